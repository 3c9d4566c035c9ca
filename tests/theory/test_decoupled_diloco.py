"""Promises of Decoupled DiLoCo: limit cases, quorum, grace window, weights, no lost time."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.worlds import EVEN, NUM_PARAMS, TARGETS, UNEVEN, Watched, make_world
from torch import Tensor

from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.methods import FixedADACOMM
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Train,
    Trained,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.topology import complete
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

NUM = NUM_WORKERS - 1
LINKS = Links(default=Link(latency=0.25))
WAITING: dict[str, Any] = {"quorum": NUM, "speeds": "equal", "waits_for_answer": True}


def final_model(algorithm: ParameterServer, **options: Any) -> Tensor:  # noqa: ANN401
    world = make_world(algorithm, links=LINKS, **options)
    assert world.run()
    params: Tensor = world.states[0].params
    return params


def commit(
    update: float,
    *,
    num_samples: int = 4,
    num_steps: int = 4,
    number: int = 1,
    **others: float,
) -> Message:
    numbers = {
        "number": number,
        "num_steps": num_steps,
        "num_trained": 1,
        "version": 0,
        "pace": 2.0,
        "num_samples": num_samples,
        **others,
    }
    return Message("commit", 0, {"update": torch.tensor([update])}, numbers)


def receivers(effects: list[Effect]) -> list[Rank]:
    return [each.receiver for each in effects if isinstance(each, Send)]


def test_with_a_barrier_and_without_momentum_it_is_fixed_adacomm() -> None:
    settings: dict[str, Any] = {"num_workers": NUM, "num_rounds": 6}
    ours = DecoupledDiLoCo(**settings, **WAITING, local_steps=3, outer_momentum=0.0)
    expected = final_model(FixedADACOMM(**settings, tau=3), platforms=UNEVEN)
    torch.testing.assert_close(final_model(ours, platforms=UNEVEN), expected)


def test_with_a_barrier_it_is_diloco() -> None:
    settings: dict[str, Any] = {"local_steps": 3, "outer_momentum": 0.6, "outer_lr": 0.8}
    ours = DecoupledDiLoCo(num_workers=NUM, num_rounds=6, **WAITING, **settings)
    diloco: Simulator[Any] = Simulator(
        DiLoCo(topology=complete(NUM), num_rounds=6, **settings),
        EVEN[:NUM],
        torch.zeros(NUM_PARAMS),
        # Our rank 0 is the server, which has no target.
        lambda rank, incarnation: QuadraticTrainer(TARGETS[rank + 1], 0.1),
    )
    assert diloco.run()
    torch.testing.assert_close(final_model(ours), diloco.states[0].params)


def test_commits_weigh_by_samples_and_samples_of_a_step() -> None:
    algorithm = DecoupledDiLoCo(num_workers=2, num_rounds=9, quorum=2, outer_momentum=0.0)
    state = algorithm.init(0, torch.zeros(1))
    algorithm.handle(state, Received(1, commit(1.0, num_samples=8, num_steps=4)), 1.0)
    algorithm.handle(state, Received(2, commit(-2.0, num_samples=4, num_steps=4)), 1.0)
    # Weights 8 * 8 / 4 = 16 and 4 * 4 / 4 = 4.
    torch.testing.assert_close(state.params, torch.tensor([(16 - 2 * 4) / 20]))


@pytest.mark.parametrize("num_samples", [2**40, 2**52])
def test_one_that_lies_about_its_samples_does_not_silence_the_others(num_samples: int) -> None:
    algorithm = DecoupledDiLoCo(num_workers=4, num_rounds=9, quorum=4, outer_momentum=0.0)
    state = algorithm.init(0, torch.zeros(1))
    for rank in (1, 2, 3):
        algorithm.handle(state, Received(rank, commit(1.0)), 1.0)
    liar = commit(-1.0, num_samples=num_samples, num_steps=1)
    algorithm.handle(state, Received(4, liar), 1.0)
    # Eight times the weight of an honest commit, and no more.
    torch.testing.assert_close(state.params, torch.tensor([(3 - 8) / 11]))


def test_commits_without_samples_count_alike() -> None:
    algorithm = DecoupledDiLoCo(num_workers=2, num_rounds=9, quorum=2, outer_momentum=0.0)
    state = algorithm.init(0, torch.zeros(1))
    for rank, update in ((1, 1.0), (2, 2.0)):
        algorithm.handle(state, Received(rank, commit(update, num_samples=0, num_steps=0)), 1.0)
    assert state.params.tolist() == [1.5]


def waiting_server(**settings: Any) -> tuple[DecoupledDiLoCo, Any, list[Effect]]:  # noqa: ANN401
    """A server of three with a quorum of two, to which two have committed; the last effects."""
    kept: dict[str, Any] = {"local_steps": 8, "grace": 0.25, **settings}
    algorithm = DecoupledDiLoCo(num_workers=3, num_rounds=9, quorum=2, **kept)
    state = algorithm.init(0, torch.zeros(1))
    assert algorithm.handle(state, Received(1, commit(1.0)), 1.0) == []
    return algorithm, state, algorithm.handle(state, Received(2, commit(1.0)), 5.0)


def test_a_quorum_waits_for_others_for_a_share_of_a_block() -> None:
    algorithm, state, effects = waiting_server()
    # A quarter of 8 steps at 2 steps per second.
    (timer,) = effects
    assert isinstance(timer, SetTimer)
    assert timer.at == 6.0
    assert receivers(algorithm.handle(state, TimerFired("window"), 6.0)) == [1, 2]


def test_one_that_claims_to_be_slow_cannot_stretch_the_grace_window() -> None:
    algorithm = DecoupledDiLoCo(num_workers=3, num_rounds=9, quorum=2, local_steps=8, grace=0.5)
    state = algorithm.init(0, torch.zeros(1))
    algorithm.handle(state, Received(1, commit(1.0)), 1.0)
    (timer,) = algorithm.handle(state, Received(2, commit(1.0, pace=1e-12)), 1.0)
    assert isinstance(timer, SetTimer)
    assert timer.at == 3.0  # half of 8 steps at 2 steps per second


def test_one_that_comes_within_the_grace_window_closes_it() -> None:
    algorithm, state, _ = waiting_server()
    assert receivers(algorithm.handle(state, Received(3, commit(1.0)), 5.5)) == [1, 2, 3]
    # Nor does what is left of the window hurry the next quorum.
    algorithm.handle(state, Received(1, commit(1.0, number=2)), 5.6)
    assert algorithm.handle(state, TimerFired("window"), 6.0) == []


def test_one_that_comes_too_late_takes_part_in_the_next_merge() -> None:
    algorithm, state, _ = waiting_server()
    algorithm.handle(state, TimerFired("window"), 6.0)
    assert not receivers(algorithm.handle(state, Received(3, commit(1.0)), 6.5))
    algorithm.handle(state, Received(1, commit(1.0, number=2)), 7.0)
    assert receivers(algorithm.handle(state, TimerFired("window"), 8.0)) == [1, 3]


def test_without_grace_a_quorum_is_merged_at_once() -> None:
    _, _, effects = waiting_server(grace=0.0)
    assert receivers(effects) == [1, 2]


def test_lost_workers_are_not_waited_for() -> None:
    algorithm = DecoupledDiLoCo(num_workers=3, num_rounds=9, quorum=3)
    state = algorithm.init(0, torch.zeros(1))
    for rank in (1, 2):
        assert algorithm.handle(state, Received(rank, commit(1.0)), 1.0) == []
    assert receivers(algorithm.handle(state, WorkerLost(3), 2.0)) == [1, 2]


@pytest.mark.parametrize("waits", [False, True])
def test_no_worker_stands_still_however_slow_the_network_is(waits: bool) -> None:
    busy: Counter[Rank] = Counter()

    def look(state: WorkerState, event: Event, now: Seconds) -> None:
        if isinstance(event, Trained):
            busy[state.rank] += event.seconds  # type: ignore[assignment]

    algorithm = DecoupledDiLoCo(
        num_workers=NUM, num_rounds=999, local_steps=4, waits_for_answer=waits
    )
    links = Links(default=Link(latency=3.0))
    world = make_world(Watched(algorithm, after=look), links=links, platforms=EVEN)
    world.run(until=100.0)
    # A block of four steps is under way at the end.
    if waits:
        assert max(busy.values()) < 50
    else:
        assert min(busy.values()) >= 96
    assert {*busy} == {1, 2, 3, 4}


def test_a_slow_worker_makes_nobody_wait() -> None:
    platforms = [EVEN[0], *EVEN[:3], Platform(throughput=0.05)]
    algorithm = DecoupledDiLoCo(
        num_workers=NUM, num_rounds=999, local_steps=4, speeds="equal", quorum=3
    )
    world = make_world(algorithm, links=LINKS, platforms=platforms)
    world.run(until=101.0)
    commits = world.states[0].num_commits
    # With a barrier, one of 80 seconds would have passed.
    assert commits[4] == 1
    assert min(commits[1], commits[2], commits[3]) >= math.floor(101 / (4 + 2 + 0.5))


def test_the_quorum_is_a_number_of_workers() -> None:
    with pytest.raises(ValueError, match="got 5 of 4"):
        DecoupledDiLoCo(num_workers=4, num_rounds=9, quorum=5)
    assert DecoupledDiLoCo(num_workers=5, num_rounds=9).num_needed == 3


# Fragments.


def fragmented_server(**settings: Any) -> tuple[DecoupledDiLoCo, Any]:  # noqa: ANN401
    """A server with a quorum of two, and a fragment for each of two entries."""
    kept: dict[str, Any] = {"quorum": 2, "grace": 0.0, "num_workers": 3, **settings}
    algorithm = DecoupledDiLoCo(num_rounds=9, fragments=2, outer_momentum=0.0, **kept)
    return algorithm, algorithm.init(0, torch.zeros(2))


def part(update: float, number: int = 1, **others: float) -> Message:
    turn: dict[str, Any] = {"turn_steps": 4, "life": 0, **others}
    return commit(update, number=number, **turn)


def names(effects: list[Effect]) -> dict[Rank, set[str]]:
    """Names of the tensors in each answer."""
    return {
        each.receiver: {*each.message.payload} for each in effects if isinstance(each, Send)
    }


def test_a_quorum_merges_its_fragment_and_nothing_else() -> None:
    algorithm, state = fragmented_server(num_workers=4)
    assert algorithm.handle(state, Received(1, part(1.0)), 1.0) == []
    assert algorithm.handle(state, Received(2, part(3.0, number=2)), 1.0) == []
    effects = algorithm.handle(state, Received(3, part(3.0)), 1.0)
    assert names(effects) == {j: {"0", "counts"} for j in [1, 3]}
    assert state.params.tolist() == [2.0, 0.0]


def test_an_answer_has_all_fragments_that_were_merged_since_the_last() -> None:
    algorithm, state = fragmented_server()
    for rank in (1, 2):
        algorithm.handle(state, Received(rank, part(1.0)), 1.0)
    for rank in (1, 2):
        second = part(1.0, number=2, version=2)
        effects = algorithm.handle(state, Received(rank, second), 2.0)
    assert names(effects) == {j: {"1", "counts"} for j in [1, 2]}
    # The third worker's first commit came too late for both.
    algorithm.handle(state, Received(3, part(1.0)), 3.0)
    effects = algorithm.handle(state, Received(1, part(1.0, number=3, version=4)), 3.0)
    assert names(effects) == {1: {"0", "counts"}, 3: {"0", "1", "counts"}}


def test_workers_that_wait_for_different_fragments_do_not_wait_for_ever() -> None:
    algorithm, state = fragmented_server(quorum=3)
    for rank, number in ((1, 1), (2, 2)):
        algorithm.handle(state, Received(rank, part(1.0, number=number)), 1.0)
    effects = algorithm.handle(state, WorkerLost(3), 2.0)
    assert receivers(effects) == [1, 2]
    assert state.params.tolist() == [1.0, 1.0]


def test_windows_of_fragments_are_apart() -> None:
    algorithm, state = fragmented_server(grace=0.25, local_steps=8, quorum=1)
    (first,) = algorithm.handle(state, Received(1, part(1.0)), 1.0)
    (second,) = algorithm.handle(state, Received(2, part(1.0, number=2)), 1.5)
    assert isinstance(first, SetTimer)
    assert isinstance(second, SetTimer)
    assert (first.at, second.at, first.name == second.name) == (2.0, 2.5, False)
    assert receivers(algorithm.handle(state, TimerFired(first.name), 2.0)) == [1]
    assert receivers(algorithm.handle(state, TimerFired(second.name), 2.5)) == [2]


def test_a_worker_that_repeats_its_commit_gets_the_whole_model() -> None:
    algorithm, state = fragmented_server()
    for rank in (1, 2):
        algorithm.handle(state, Received(rank, part(1.0)), 1.0)
    # The first answer was lost.
    effects = algorithm.handle(state, Received(1, part(1.0)), 2.0)
    assert names(effects) == {1: {"params", "counts"}}


def test_a_commit_from_the_model_of_a_former_life_gets_the_whole_model() -> None:
    algorithm, state = fragmented_server()
    algorithm.recall(state, {"life": 4})
    algorithm.handle(state, Received(1, part(1.0, life=4)), 1.0)
    effects = algorithm.handle(state, Received(2, part(1.0, life=5)), 1.0)
    assert names(effects) == {1: {"params", "counts"}, 2: {"0", "counts"}}


def test_a_commit_of_another_length_is_dropped() -> None:
    algorithm = DecoupledDiLoCo(num_workers=2, num_rounds=9, quorum=1, fragments=2)
    state: Any = algorithm.init(0, torch.zeros(3))
    two = Message("commit", 0, {"update": torch.ones(2)}, part(0.0).numbers)
    assert not receivers(algorithm.handle(state, Received(1, two), 1.0))
    assert not state.waiting


@pytest.mark.parametrize("fragments", [2, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_after_all_turns_every_entry_was_merged_once(fragments: int, waits: bool) -> None:
    merged = Counter[int]()

    def look(state: WorkerState, event: Event, now: Seconds) -> None:
        if state.rank == 0:
            merged.update(torch.nonzero(state.params).flatten().tolist())

    algorithm = DecoupledDiLoCo(
        num_workers=NUM,
        num_rounds=fragments,
        **{**WAITING, "waits_for_answer": waits},
        local_steps=2,
        fragments=fragments,
    )
    world = make_world(Watched(algorithm, after=look), links=LINKS, platforms=EVEN)
    assert world.run()
    server = world.states[0]
    assert set(merged) == set(range(NUM_PARAMS))
    assert {*server.merged_at} == set(range(fragments))
    assert {*server.num_commits.values()} == {fragments}


def test_a_commit_has_a_share_of_the_bytes() -> None:
    params = torch.zeros(12)
    whole, parts = (
        DecoupledDiLoCo(num_workers=NUM, num_rounds=3, fragments=n).schema(params)["commit"]
        for n in (1, 4)
    )
    assert parts.max_num_bytes == whole.max_num_bytes / 4


def sent_by(fragments: int) -> list[Message]:
    """The commits of worker 1, each answered with an unchanged model; training adds 1."""
    algorithm = DecoupledDiLoCo(
        num_workers=NUM, num_rounds=9, local_steps=2, fragments=fragments, waits_for_answer=True
    )
    state: Any = algorithm.init(1, torch.zeros(4))
    effects, sent = algorithm.handle(state, Started(num_samples=8, epoch_cost=8), 0.0), []
    for number in range(1, 5):
        (train,) = (each for each in effects if isinstance(each, Train))
        trained = Trained(
            params=train.params + 1,
            before=train.params,
            loss=0.0,
            num_steps=2,
            num_samples=6,
            seconds=1.0,
        )
        (send,) = algorithm.handle(state, trained, float(number))
        assert isinstance(send, Send)
        sent.append(send.message)
        counts = torch.tensor([number, 0, 0, 0])
        answer = Message("params", number, {"counts": counts}, {"fastest": 2.0, "life": 0})
        effects = algorithm.handle(state, Received(0, answer), number + 0.5)
    return sent


def test_a_fragment_waits_for_its_turn_with_what_was_learned_and_its_samples() -> None:
    updates = [each.payload["update"].tolist() for each in sent_by(2)]
    # Nothing is merged, so each answer takes the committed fragment back to 0.
    assert updates == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    assert [each.numbers["num_samples"] for each in sent_by(2)] == [6, 12, 12, 12]
    assert [each.numbers["turn_steps"] for each in sent_by(2)] == [2, 4, 4, 4]
    assert [each.numbers["num_steps"] for each in sent_by(2)] == [2, 2, 2, 2]


def test_statistics_are_those_at_the_end_of_each_fragment() -> None:
    algorithm = DecoupledDiLoCo(num_workers=NUM, num_rounds=9, fragments=3)
    state: Any = algorithm.init(1, torch.zeros(6))
    for number, expected in ((1, 2), (2, 1), (3, 0)):
        numbers = {"number": number, "num_trained": 3, "num_steps": 1, "num_samples": 1}
        whole = Message("commit", 0, {"update": torch.zeros(6)}, numbers)
        cut, _ = algorithm.divide(state, whole)
        assert cut.numbers["num_trained"] == expected


def test_equal_workers_come_to_rest_where_one_fragment_does() -> None:
    settings: dict[str, Any] = {"num_workers": NUM, "local_steps": 2, "outer_momentum": 0.0}
    parts = DecoupledDiLoCo(**settings, **WAITING, num_rounds=240, fragments=3)
    whole = DecoupledDiLoCo(**settings, **WAITING, num_rounds=240)
    torch.testing.assert_close(
        final_model(parts, platforms=EVEN), final_model(whole, platforms=EVEN)
    )


@pytest.mark.parametrize("fragments", [0, NUM_PARAMS + 1])
def test_each_fragment_has_an_entry(fragments: int) -> None:
    with pytest.raises(ValueError, match=f"got {fragments}"):
        DecoupledDiLoCo(num_workers=4, num_rounds=9, fragments=fragments).init(
            0, torch.zeros(NUM_PARAMS)
        )


@pytest.mark.parametrize("wrapper", [Standby, partial(Shards, num_servers=2)])
def test_wrappers_that_need_whole_models_refuse_fragments(wrapper: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match="leave out fragments"):
        wrapper(inner=DecoupledDiLoCo(num_workers=4, num_rounds=9, fragments=2))
