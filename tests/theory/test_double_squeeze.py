"""DoubleSqueeze against its theory: one model for all, and nothing is lost by compressing."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from tests.agreement import distances
from tests.algorithms import NUM_ROUNDS, NUM_WORKERS
from tests.tiers import first
from tests.trained import trained_event
from tests.worlds import (
    EVEN,
    NUM_PARAMS,
    TARGETS,
    UNEVEN,
    Recorder,
    Watched,
    final_params,
    make_world,
)
from torch import Tensor

from edgegossip.algorithms.all_reduce import AllReduce
from edgegossip.algorithms.double_squeeze import (
    CHECK_EVERY,
    DoubleSqueeze,
    DoubleSqueezeState,
)
from edgegossip.core.compression.sparse import RandomK, TopK
from edgegossip.core.compression.values import Quantize
from edgegossip.core.protocol import (
    Effect,
    Event,
    Layout,
    Rank,
    Received,
    Seconds,
    Send,
    Started,
    TimerFired,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.core.topology import Topology, complete, ring, star
from edgegossip.sim.fault import Crash, Drop, Fault, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links

COMPRESSED = TopK(0.4, Quantize(2))
EVERYONE = complete(NUM_WORKERS)


def squeezed(**others: Any) -> DoubleSqueeze:  # noqa: ANN401
    settings: dict[str, Any] = {"topology": EVERYONE, "num_rounds": NUM_ROUNDS}
    return DoubleSqueeze(**{**settings, "local_steps": 3, **others})


def test_without_compression_and_momentum_a_round_averages_exactly() -> None:
    exact = AllReduce(topology=EVERYONE, num_rounds=NUM_ROUNDS, local_steps=3)
    after = final_params(make_world(squeezed(outer_momentum=0.0)))
    torch.testing.assert_close(after, final_params(make_world(exact)))


def test_outer_step_is_that_of_sgd_with_nesterovs_momentum() -> None:
    model = torch.zeros(NUM_PARAMS, requires_grad=True)
    outer = torch.optim.SGD([model], lr=0.8, momentum=0.6, nesterov=True)
    for _ in range(NUM_ROUNDS):
        # Three steps of 0.1 towards each target leave 0.9 ** 3 of the way.
        model.grad = -(1 - 0.9**3) * (TARGETS[:NUM_WORKERS] - model.detach()).mean(0)
        outer.step()
    after = final_params(make_world(squeezed(outer_momentum=0.6, outer_lr=0.8)))
    torch.testing.assert_close(after, model.detach().expand_as(after))


@pytest.mark.parametrize("num_workers", [2, 4, NUM_WORKERS, NUM_PARAMS + 2])
def test_all_have_the_same_model_to_the_last_bit(num_workers: int) -> None:
    algorithm = squeezed(topology=complete(num_workers), compressor=COMPRESSED)
    platforms = (UNEVEN * 2)[:num_workers]
    after = final_params(make_world(algorithm, platforms=platforms))
    assert after[0].norm() > 0
    assert all(torch.equal(each, after[0]) for each in after)


def test_what_compressing_holds_back_is_all_that_is_missing() -> None:
    trained: list[Tensor] = []

    def note(_state: WorkerState, event: Event, _now: Seconds) -> None:
        if isinstance(event, Trained):
            trained.append(event.delta)

    algorithm = squeezed(outer_momentum=0.0, compressor=COMPRESSED)
    simulator = make_world(Watched(algorithm, after=note))
    after = final_params(simulator)[0]
    owner_errors = torch.zeros_like(after)
    for rank, state in enumerate(simulator.states):
        own = owner_errors[rank::NUM_WORKERS]
        own += state.held[rank].error[: len(own)]
    errors = torch.stack([state.error for state in simulator.states]).mean(0)
    assert min(errors.norm(), owner_errors.norm()) > 0.01
    progress = torch.stack(trained).sum(0) / NUM_WORKERS
    torch.testing.assert_close(after + errors + owner_errors, progress)


def test_each_worker_sends_two_compressed_vectors_at_most() -> None:
    recorder = Recorder()
    make_world(squeezed(compressor=COMPRESSED), observer=recorder).run()
    names = [name for message, _ in recorder.messages for name in message.payload]
    # A chunk to each owner, and the own one to each of the others.
    assert len(names) == NUM_ROUNDS * NUM_WORKERS * 2 * (NUM_WORKERS - 1)
    assert {name.partition(".")[2] for name in names} == {"bits"}


CUT = Partition(start=30.0, end=60.0, group=(0, 1))


@pytest.mark.parametrize(
    ("links", "script"),
    first(
        2,
        [
            (None, (Drop(probability=0.3, end=30.0),)),
            (None, (Crash(at=13.0, rank=2), Recover(at=24.0, rank=2))),
            (None, (Crash(at=17.0, rank=2), Recover(at=17.01, rank=2))),
            (None, (CUT,)),
            (Links(default=Link(bandwidth=100.0)), (Crash(at=10.2, rank=3),)),
            (None, (Crash(at=9.0, rank=1), Crash(at=11.0, rank=2), Recover(at=30.0, rank=1))),
        ],
    ),
    ids=[
        "messages lost",
        "lost for a while",
        "restarted",
        "cut",
        "lost in sending",
        "two lost",
    ],
)
def test_workers_that_have_come_to_differ_agree_again(
    links: Links | None, script: tuple[Fault, ...]
) -> None:
    algorithm = squeezed(
        topology=complete(4), num_rounds=60, timeout=20.0, compressor=COMPRESSED
    )
    found = distances(algorithm, EVEN[:4], script, links)
    assert max(found) > 0.1
    assert found[-1] == 0.0


@pytest.mark.parametrize("seed", first(2, range(12)))
def test_all_agree_in_the_end_after_crashes_and_cuts(seed: int) -> None:
    draw = random.Random(seed)
    num_workers = draw.randint(3, 5)
    script: list[Fault] = []
    for _ in range(draw.randint(1, 5)):
        rank, at = draw.randrange(num_workers), draw.uniform(0.0, 20.0)
        back = at + draw.choice([0.0, 0.01, 0.1, 1.0, 10.0])
        script += [Crash(at=at, rank=rank), Recover(at=back, rank=rank)]
    some = tuple(draw.sample(range(num_workers), draw.randint(1, num_workers - 1)))
    script.append(Partition(start=15.0, end=draw.choice([19.0, 25.0]), group=some))
    faults = Faults(script=tuple(script), detection_time=draw.choice([0.0, 0.5, 3.0]))
    # On slower links, one that is cut off trains on faster than the others exchange, and has
    # finished before they meet again.
    link = Link(latency=draw.choice([0.0, 0.1, 0.3]), bandwidth=10 ** draw.uniform(3.5, 6))
    algorithm = squeezed(
        topology=complete(num_workers),
        num_rounds=100,
        local_steps=1,
        compressor=COMPRESSED,
    )
    world = make_world(
        algorithm, platforms=UNEVEN[:num_workers], links=Links(default=link), faults=faults
    )
    assert world.run()
    models = [state.params for state in world.states]
    assert all(torch.equal(model, models[0]) for model in models)


# One worker of three, driven by hand; it owns entries 0 and 3 of five.

ONE = squeezed(topology=complete(3), outer_momentum=0.0, timeout=1.0)


def after_training(algorithm: DoubleSqueeze = ONE) -> tuple[DoubleSqueezeState, list[Effect]]:
    state = algorithm.init(0, torch.zeros(5))
    algorithm.handle(state, Started(), 0.0)
    event = trained_event(torch.arange(1.0, 6.0), torch.zeros(5))
    return state, algorithm.handle(state, event, 0.0)


def hear(
    state: DoubleSqueezeState, sender: Rank, exchange: int, payload: Mapping[str, list[float]]
) -> dict[Rank, dict[str, list[float]]]:
    """The payloads that the worker sends when it hears this, by receiver."""
    tensors = {name: torch.tensor(values) for name, values in payload.items()}
    message = ONE.message("params", exchange, tensors)
    return sent(ONE.handle(state, Received(sender, message), 0.0))


def sent(effects: Iterable[Effect]) -> dict[Rank, dict[str, list[float]]]:
    """The payload for each receiver."""
    return {
        effect.receiver: {name: x.tolist() for name, x in effect.message.payload.items()}
        for effect in effects
        if isinstance(effect, Send) and effect.message.kind == "params"
    }


def one_that_is_back(exchange: int) -> tuple[DoubleSqueezeState, list[Effect]]:
    """It has caught up with the others at this exchange, with entries 0 to 4."""
    state = ONE.init(0, torch.zeros(5))
    ONE.handle(state, Started(has_rejoined=True), 0.0)
    effects: list[Effect] = []
    for sender in (1, 2):
        whole = {"params": torch.arange(5.0)}
        back = Received(sender, ONE.message("catch-up", exchange, whole))
        effects = ONE.handle(state, back, 0.0)
    return state, effects


def test_each_owner_hears_of_its_chunk_and_all_hear_of_the_own_one() -> None:
    state, effects = after_training()
    assert sent(effects) == {1: {"1.values": [2, 5]}, 2: {"2.values": [3, 0]}}
    assert hear(state, 1, 0, {"0.values": [4.0, 1.0]}) == {}
    told = hear(state, 2, 0, {"0.values": [1.0, 1.0]})
    assert told == {1: {"0.values": [2, 2]}, 2: {"0.values": [2, 2]}}
    hear(state, 1, 1, {"1.values": [7.0, 8.0]})
    hear(state, 2, 1, {"2.values": [9.0, 0.0]})
    assert state.params.tolist() == [2, 7, 9, 2, 8]
    assert not state.error.any()


def test_one_whose_copy_is_outdated_gets_the_whole_chunk() -> None:
    state, _ = after_training()
    hear(state, 1, 0, {"0.values": [4.0, 1.0], "0.request": []})
    told = hear(state, 2, 0, {"0.values": [1.0, 1.0]})
    assert told == {1: {"0.whole": [2, 2]}, 2: {"0.values": [2, 2]}}


def test_request_follows_a_message_that_is_missing_until_the_chunk_has_come() -> None:
    state, _ = after_training()
    for sender in (1, 2):
        hear(state, sender, 0, {"0.values": [0.0, 0.0]})
    hear(state, 1, 1, {"1.values": [0.0, 0.0]})
    ONE.handle(state, TimerFired("round"), 1.0)
    assert state.outdated == {2: None}
    event = trained_event(state.params, state.params)
    asked = sent(ONE.handle(state, event, 1.0))
    assert asked == {1: {"1.values": [0, 0]}, 2: {"2.values": [0, 0], "2.request": []}}
    for sender in (1, 2):
        hear(state, sender, 2, {"0.values": [0.0, 0.0]})
    hear(state, 1, 3, {"1.values": [0.0, 0.0]})
    hear(state, 2, 3, {"2.whole": [6.0, 0.0]})
    assert state.outdated == {}
    assert state.params[2] == 6


def test_next_worker_holds_the_chunk_of_one_that_is_lost() -> None:
    state, _ = after_training()
    ONE.handle(state, WorkerLost(2), 0.0)
    told = hear(state, 1, 0, {"0.values": [4.0, 1.0]})
    # Worker 2 may have combined what it got, and told some: from now on this copy counts.
    assert told == {1: {"0.values": [2.5, 2.5], "2.whole": [0, 0]}}
    hear(state, 1, 1, {"1.values": [0.0, 0.0]})
    event = trained_event(state.params + 1, state.params)
    assert sent(ONE.handle(state, event, 1.0)) == {1: {"1.values": [1, 1]}}
    told = hear(state, 1, 2, {"0.values": [3.0, 3.0], "2.values": [5.0, 0.0]})
    assert told == {1: {"0.values": [2, 2], "2.values": [3, 0]}}


def test_owner_that_is_back_is_asked_for_its_chunk() -> None:
    state, _ = after_training()
    ONE.handle(state, WorkerLost(2), 0.0)
    hear(state, 1, 0, {"0.values": [4.0, 1.0]})
    ONE.handle(state, WorkerJoined(2), 0.0)
    hear(state, 1, 1, {"1.values": [0.0, 0.0]})
    event = trained_event(state.params, state.params)
    assert sent(ONE.handle(state, event, 1.0))[2] == {"2.values": [0, 0], "2.request": []}
    assert [*state.held] == [0]


def test_only_the_holder_is_believed() -> None:
    state, _ = after_training()
    for sender in (1, 2):
        hear(state, sender, 0, {"0.values": [0.0, 0.0]})
    hear(state, 1, 1, {"1.values": [1.0, 1.0], "2.values": [9.0, 9.0], "0.whole": [9.0, 9.0]})
    hear(state, 2, 1, {"2.values": [1.0, 0.0]})
    assert state.params[[1, 2, 4]].tolist() == [1, 1, 1]
    assert state.params[[0, 3]].tolist() == torch.tensor([1 / 3, 4 / 3]).tolist()


def test_one_that_is_back_sends_its_chunk_to_all_and_asks_for_theirs() -> None:
    state, _ = one_that_is_back(4)
    event = trained_event(state.params + 1, state.params)
    asked = sent(ONE.handle(state, event, 0.0))
    assert asked == {
        1: {"1.values": [1, 1], "1.request": []},
        2: {"2.values": [1, 0], "2.request": []},
    }
    hear(state, 1, 4, {"0.values": [1.0, 1.0]})
    told = hear(state, 2, 4, {"0.values": [1.0, 1.0]})
    assert told == {1: {"0.whole": [1, 4]}, 2: {"0.whole": [1, 4]}}


def test_one_that_comes_back_between_the_exchanges_sends_its_chunk() -> None:
    _, effects = one_that_is_back(1)
    assert sent(effects) == {1: {"0.whole": [0, 3]}, 2: {"0.whole": [0, 3]}}


def test_one_that_had_to_go_back_says_so_and_the_models_agree_again() -> None:
    algorithm = squeezed(num_rounds=16, local_steps=1)
    world = make_world(algorithm)
    world.run(until=3.5)
    went_back = world.states[1]
    good = went_back.params.clone()
    algorithm.learn(went_back, trained_event(good, good, num_steps=0, has_gone_back=True))
    assert torch.equal(went_back.params, good)
    assert not went_back.held
    world.run()
    models = [state.params for state in world.states]
    assert all(torch.equal(model, models[0]) for model in models)


def test_one_that_goes_back_to_sound_parameters_drops_what_it_has_not_sent() -> None:
    state, _ = after_training()
    state.error = torch.ones(5)
    sound = torch.full((5,), 7.0)
    ONE.learn(state, trained_event(sound, sound, num_steps=0, has_gone_back=True))
    assert torch.equal(ONE.start(state), sound)


def test_one_that_skips_rounds_asks_for_all_chunks() -> None:
    state, _ = after_training()
    for sender in (1, 2):
        ahead = ONE.message("catch-up", 12, {"params": torch.arange(5.0)})
        ONE.handle(state, Received(sender, ahead), 0.0)
    assert state.round == 6
    assert torch.equal(ONE.start(state), torch.arange(5.0))
    asked = sent(ONE.handle(state, trained_event(state.params, state.params), 0.0))
    assert asked == {
        1: {"1.values": [0, 0], "1.request": []},
        2: {"2.values": [0, 0], "2.request": []},
    }


def test_one_that_is_back_and_hears_from_nobody_does_not_trust_its_copies() -> None:
    state = ONE.init(0, torch.zeros(5))
    ONE.handle(state, Started(has_rejoined=True), 0.0)
    ONE.handle(state, TimerFired("round"), 1.0)
    assert {1, 2} <= state.outdated.keys()


def test_update_of_an_earlier_life_does_not_hide_that_the_holder_has_changed() -> None:
    state, _ = after_training()
    hear(state, 2, 0, {"0.values": [0.0, 0.0]})
    hear(state, 2, 1, {"2.values": [5.0, 0.0]})  # what it does not know of when it is back
    ONE.handle(state, WorkerLost(2), 0.0)
    ONE.handle(state, WorkerJoined(2), 0.0)
    hear(state, 1, 0, {"0.values": [0.0, 0.0]})
    hear(state, 1, 1, {"1.values": [0.0, 0.0]})
    assert state.outdated == {2: None}


def test_copy_without_the_checksum_of_the_holder_is_outdated() -> None:
    algorithm = squeezed(topology=complete(3), num_rounds=3 * CHECK_EVERY)
    world = make_world(algorithm, platforms=EVEN[:3])
    world.run(until=10.0)
    one = world.states[0]
    assert 0 < one.round < CHECK_EVERY - 1
    one.params = one.params + 1  # nobody knows why
    for until in range(11, 1000):
        world.run(until=float(until))
        if one.round >= CHECK_EVERY:
            break
        assert not one.outdated
    assert one.outdated == {1: None, 2: None}
    world.run()
    models = [state.params for state in world.states]
    assert all(torch.equal(model, models[0]) for model in models)


def test_compressors_that_draw_at_random_draw_anew_for_each_chunk_and_round() -> None:
    algorithm = squeezed(topology=complete(3), compressor=RandomK(0.5))
    state = algorithm.init(0, torch.zeros(60))
    drawn = set()
    for state.exchange, state.round in ((0, 0), (2, 1)):
        for chunk in (1, 2):
            state.error = torch.ones(60)
            algorithm.outgoing(state, chunk)
            drawn.add(tuple(state.error[chunk::3].tolist()))
    assert len(drawn) == 4


def test_running_statistics_are_combined_without_momentum() -> None:
    algorithm = squeezed(topology=complete(1))
    state = algorithm.init(0, torch.zeros(3))
    algorithm.handle(state, Started(layout=Layout(num_trained=2)), 0.0)
    for _ in range(2):
        after = state.params + torch.ones(3)
        algorithm.handle(state, trained_event(after, state.params), 0.0)
    # With 0.7: 1 + 0.7, and then 1 + 0.7 * (1 + 0.7) more.
    torch.testing.assert_close(state.params, torch.tensor([3.89, 3.89, 2.0]))


def test_statistics_of_every_owner_are_told_from_its_other_entries() -> None:
    def with_layout(state: WorkerState, event: Event, _now: Seconds) -> None:
        if isinstance(event, Started):
            state.layout = Layout(num_trained=NUM_PARAMS - 3)  # type: ignore[attr-defined]

    plain = final_params(make_world(squeezed(outer_momentum=0.0)))
    moved = final_params(make_world(squeezed()))
    both = final_params(make_world(Watched(squeezed(), after=with_layout)))
    torch.testing.assert_close(both[:, :-3], moved[:, :-3])
    torch.testing.assert_close(both[:, -3:], plain[:, -3:])


@pytest.mark.parametrize("payload", [{}, {"0.request": []}], ids=["nothing", "a request"])
def test_message_without_values_counts_for_nothing(payload: dict[str, list[float]]) -> None:
    state, _ = after_training()
    hear(state, 1, 0, payload)
    hear(state, 2, 0, {"0.values": [3.0, 0.0]})
    assert state.params.tolist() == [2, 0, 0, 2, 0]


@pytest.mark.parametrize("topology", [ring(4), star(3)], ids=repr)
def test_other_topologies_than_the_complete_one_are_refused(topology: Topology) -> None:
    with pytest.raises(ValueError, match=r"DoubleSqueeze needs the complete topology"):
        DoubleSqueeze(topology=topology, num_rounds=1)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("local_steps", 0, "at least 1"),
        ("outer_momentum", 1.0, r"in \[0, 1\)"),
        ("outer_lr", 0.0, "above 0"),
    ],
)
def test_bad_numbers_are_refused(name: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be {allowed}, got {value}"):
        squeezed(**{name: value})
