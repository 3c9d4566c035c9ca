"""DivShare: what is averaged, what a slow link carries, and that nobody waits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.effects import of_type, only
from tests.trained import trained_event
from tests.worlds import INITIAL, TARGETS, UNEVEN, Recorder, final_params, make_world

from edgegossip.algorithms.gossip.divshare import DivShare, DivShareState
from edgegossip.contract.algorithm import Setting
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.protocol import (
    Effect,
    Message,
    Received,
    Send,
    Started,
    Train,
    WorkerLost,
)
from edgegossip.contract.topology import complete, ring
from edgegossip.sim.fault import Crash, Drop, Faults, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

START = INITIAL[:NUM_WORKERS]
TWO = DivShare(topology=complete(2), num_rounds=99, num_fragments=3, num_receivers=1)


def divshare(**arguments: Any) -> DivShare:  # noqa: ANN401
    return DivShare(
        **{"topology": complete(5), "num_rounds": 15, "num_fragments": 3} | arguments
    )


def started(algorithm: DivShare, *values: float, has_rejoined: bool = False) -> DivShareState:
    state = algorithm.init(0, torch.tensor(values))
    algorithm.handle(state, Started(has_rejoined=has_rejoined), 0.0)
    return state


def fragment(
    sender: int, k: int, *values: float, round: int = 1, is_new: bool = False
) -> Received:
    numbers = {"is_new": 1} if is_new else {}
    payload = {str(k): torch.tensor(values)}
    return Received(sender, Message("fragment", round, payload, numbers))


def end_block(algorithm: DivShare, state: DivShareState, now: float = 1.0) -> list[Effect]:
    return algorithm.handle(state, trained_event(state.params, state.params), now)


def test_each_entry_is_averaged_over_what_has_come_and_the_own_value() -> None:
    algorithm = divshare(topology=complete(4), exchange_probability=0.0)
    state = started(algorithm, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    for event in (
        fragment(2, 0, 4.0, 4.0),
        fragment(1, 0, 10.0, 1.0),
        fragment(3, 2, 3.0, 5.0),
    ):
        algorithm.handle(state, event, 0.5)
    end_block(algorithm, state)
    assert state.params.tolist() == [5.0, 2.0, 1.0, 1.0, 2.0, 3.0]
    end_block(algorithm, state)  # each counts once
    assert state.params.tolist() == [5.0, 2.0, 1.0, 1.0, 2.0, 3.0]


def test_newest_values_of_a_sender_count_whatever_the_order_of_arrival() -> None:
    for order in ([1, 2], [2, 1]):
        state = started(TWO, 0.0, 0.0, 0.0)
        for round in order:
            TWO.handle(state, fragment(1, 1, 4.0 * round, round=round), 0.5)
        end_block(TWO, state)
        assert state.params.tolist() == [0.0, 4.0, 0.0]


def test_all_of_a_model_goes_to_each_of_as_many_receivers() -> None:
    algorithm = divshare(topology=complete(9), num_fragments=4, num_receivers=3)
    state = started(algorithm, *range(8))
    sent = of_type(end_block(algorithm, state), Send)
    queued = Counter(k for fragments in state.queue.values() for k in fragments)
    queued.update(int(k) for send in sent for k in send.message.payload)
    assert queued == dict.fromkeys(range(4), 3)
    for send in sent:
        [(k, values)] = send.message.payload.items()
        assert values.tolist() == [2.0 * int(k), 2.0 * int(k) + 1]


def test_the_next_fragment_leaves_when_the_last_one_has_arrived() -> None:
    state = started(TWO, 1.0, 2.0, 3.0)
    effects = end_block(TWO, state)
    first = only(Send, effects)
    assert only(Train, effects).params is state.params
    names = {*first.message.payload}
    for _ in range(2):
        [effect] = TWO.handle(state, Received(1, Message("ack", 1)), 1.5)
        assert isinstance(effect, Send)
        names |= {*effect.message.payload}
    assert names == {"0", "1", "2"}
    assert TWO.handle(state, Received(1, Message("ack", 1)), 1.5) == []


def test_a_slow_link_carries_the_newest_model() -> None:
    state = started(TWO, 0.0, 0.0, 0.0)
    end_block(TWO, state)
    for value in (1.0, 2.0, 3.0):  # blocks end, and the first fragment is still under way
        event = trained_event(torch.full((3,), value), state.params)
        assert of_type(TWO.handle(state, event, 1 + value), Send) == []
    assert sum(map(len, state.queue.values())) == 3
    [effect] = TWO.handle(state, Received(1, Message("ack", 1)), 4.5)
    assert isinstance(effect, Send)
    [values] = effect.message.payload.values()
    assert values.tolist() == [3.0]
    assert effect.message.round == 4


def test_a_late_acknowledgement_of_a_fragment_that_was_given_up_frees_no_link() -> None:
    algorithm = divshare(topology=complete(2), num_receivers=1, timeout=2.0)
    state = started(algorithm, 0.0, 0.0, 0.0)
    assert of_type(end_block(algorithm, state, now=1.0), Send)
    assert of_type(end_block(algorithm, state, now=2.5), Send) == []
    assert of_type(end_block(algorithm, state, now=3.0), Send)
    assert algorithm.handle(state, Received(1, Message("ack", 1)), 3.5) == []
    assert of_type(algorithm.handle(state, Received(1, Message("ack", 3)), 3.5), Send)


def test_every_fragment_is_acknowledged() -> None:
    state = started(TWO, 0.0, 0.0, 0.0)
    answer = only(Send, TWO.handle(state, fragment(1, 0, 1.0, round=7), 0.5))
    assert (answer.receiver, answer.message.kind, answer.message.round) == (1, "ack", 7)


def test_after_the_last_block_what_still_comes_is_averaged_at_once() -> None:
    algorithm = divshare(topology=complete(2), num_rounds=1, exchange_probability=0.0)
    state = started(algorithm, 1.0, 1.0, 1.0)
    end_block(algorithm, state)
    algorithm.handle(state, fragment(1, 2, 5.0), 2.0)
    assert state.params.tolist() == [1.0, 1.0, 3.0]


def test_worker_that_comes_back_takes_over_what_it_hears_fragment_by_fragment() -> None:
    state = started(TWO, 0.0, 0.0, 0.0, has_rejoined=True)
    sent = only(Send, end_block(TWO, state))
    assert sent.message.numbers == {"is_new": 1}
    TWO.handle(state, fragment(1, 1, 6.0), 1.5)
    end_block(TWO, state, 2.0)
    assert state.params.tolist() == [0.0, 6.0, 0.0]
    assert [*state.unknown] == [0, 2]
    TWO.handle(state, fragment(1, 1, 4.0), 2.5)
    end_block(TWO, state, 3.0)
    assert state.params.tolist() == [0.0, 5.0, 0.0]


def test_fragments_of_one_that_has_come_back_count_only_for_another_such() -> None:
    others, alike = started(TWO, 1.0, 1.0, 1.0), started(TWO, 1.0, 1.0, 1.0, has_rejoined=True)
    for state in (others, alike):
        TWO.handle(state, fragment(1, 0, 3.0, is_new=True), 0.5)
        end_block(TWO, state)
    assert others.params.tolist() == [1.0, 1.0, 1.0]
    assert alike.params.tolist() == [2.0, 1.0, 1.0]
    assert 0 in alike.unknown


def test_what_a_liar_has_sent_is_forgotten_and_nothing_is_sent_to_the_lost() -> None:
    state = started(TWO, 0.0, 0.0, 0.0)
    TWO.handle(state, fragment(1, 1, 9.0), 0.5)
    TWO.handle(state, WorkerLost(1, has_lied=True), 0.6)
    assert of_type(end_block(TWO, state), Send) == []
    assert state.params.tolist() == [0.0, 0.0, 0.0]


def test_exchange_alone_leads_to_agreement_near_the_mean() -> None:
    algorithm = divshare(num_rounds=60)
    after = final_params(make_world(algorithm, initial=START, lr=0.0, platforms=UNEVEN))
    assert consensus_distance(after) < 1e-3 * consensus_distance(START)
    torch.testing.assert_close(after.mean(0), START.mean(0), atol=0.3, rtol=0.0)


def test_training_comes_near_the_optimum_of_all() -> None:
    after = final_params(make_world(divshare(num_rounds=200), lr=0.02))
    torch.testing.assert_close(after.mean(0), TARGETS[:5].mean(0), atol=0.1, rtol=0.0)
    assert consensus_distance(after) < 0.3 * consensus_distance(TARGETS[:5])


@pytest.mark.parametrize(
    "links", [Links(), Links(default=Link(latency=0.7, bandwidth=20.0))], ids=["fast", "slow"]
)
def test_nobody_waits_for_the_slowest(links: Links) -> None:
    recorder = Recorder()
    make_world(divshare(num_rounds=8), platforms=UNEVEN, observer=recorder, links=links).run()
    finished = {rank: now for now, rank, what in recorder.trace if what == "finished"}
    assert finished == pytest.approx(
        {rank: 8 / platform.throughput for rank, platform in enumerate(UNEVEN)}
    )


def test_a_slow_link_is_never_idle_and_a_slow_receiver_delays_nobody_else() -> None:
    # Worker 0's uplink takes some blocks per model; worker 4 hears each message very late.
    late = {(rank, 4): Link(latency=50.0) for rank in range(4)}
    platforms = [Platform(throughput=1.0, uplink=100.0), *[Platform(throughput=1.0)] * 4]
    recorder = Recorder()
    world = make_world(
        divshare(num_rounds=40, num_fragments=7),
        platforms=platforms,
        observer=recorder,
        links=Links(overrides=late),
    )
    world.run(until=39.5)
    sent = [(now, what) for now, rank, what in recorder.trace if rank == 0 and "sent" in what]
    num_bytes = sum(int(what.split()[1]) for now, what in sent)
    assert 0.9 * 100.0 * 38.5 < num_bytes < 100.0 * 38.5 + 5 * 200
    to_late = [int(what.split()[1]) for _, what in sent if what.endswith("to 4")]
    assert Counter(to_late)[max(to_late)] == 1


def test_losses_cost_only_what_is_lost() -> None:
    faults = Faults(script=(Drop(probability=0.3),), seed=1)
    algorithm = divshare(num_rounds=80, timeout=2.0)
    after = final_params(make_world(algorithm, initial=START, lr=0.0, faults=faults))
    assert consensus_distance(after) < 1e-3 * consensus_distance(START)


def test_worker_that_comes_back_does_not_pull_the_others_to_the_start() -> None:
    # Without training all agree on 3; the one that crashed would bring in its 0.
    faults = Faults(script=(Crash(at=4.5, rank=1), Recover(at=6.25, rank=1)))
    initial = torch.full((5, 6), 3.0)
    algorithm = divshare(topology=ring(5), num_rounds=30)
    after = final_params(make_world(algorithm, initial=initial, lr=0.0, faults=faults))
    assert torch.equal(after, initial)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_fragments": 0}, "num_fragments must be at least 1, got 0"),
        ({"num_receivers": 1.5}, "num_receivers must be a whole number, got 1.5"),
        ({"timeout": 0.0}, "timeout must be above 0 or None, got 0.0"),
        ({"exchange_probability": 1.5}, r"exchange_probability must be in \[0, 1\], got 1.5"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        divshare(**arguments)


def test_a_lossy_network_needs_a_timeout() -> None:
    lossy = Setting(drops_messages=True)
    [warning] = divshare().warnings(lossy)
    assert "give it a timeout" in warning
    assert divshare(timeout=2.0).warnings(lossy) == []
    assert divshare().warnings(Setting()) == []
