"""DoubleSqueeze against its theory: one model for all, and nothing is lost by compressing."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.agreement import distances, outer_sgd
from tests.algorithms import NUM_ROUNDS, NUM_WORKERS
from tests.tiers import first, thorough
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

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.double_squeeze import (
    CHECK_EVERY,
    DoubleSqueeze,
    DoubleSqueezeState,
)
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.compression.sparse import RandomK, TopK
from edgegossip.compression.values import Quantize
from edgegossip.contract.protocol import (
    Event,
    Layout,
    Seconds,
    Started,
    Trained,
    WorkerState,
)
from edgegossip.contract.topology import Topology, complete, ring, star
from edgegossip.sim.fault import Crash, Drop, Fault, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.traces import drift

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
    after = final_params(make_world(squeezed(outer_momentum=0.6, outer_lr=0.8)))
    expected = outer_sgd(NUM_ROUNDS, local_steps=3, lr=0.8, momentum=0.6)
    torch.testing.assert_close(after, expected.expand_as(after))


@pytest.mark.parametrize("num_workers", first(2, [2, 4, NUM_WORKERS, NUM_PARAMS + 2]))
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


@thorough
@pytest.mark.parametrize(
    ("links", "script"),
    first(
        1,
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


@pytest.mark.parametrize("seed", first(0, range(12)))
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
        overlap=seed % 2 == 1,
        compressor=COMPRESSED,
    )
    world = make_world(
        algorithm, platforms=UNEVEN[:num_workers], links=Links(default=link), faults=faults
    )
    assert world.run()
    models = [state.params for state in world.states]
    assert all(torch.equal(model, models[0]) for model in models)


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


# Exchanges beside training.


def overlapped(**others: Any) -> DoubleSqueeze:  # noqa: ANN401
    return squeezed(overlap=True, **others)


def test_if_exchanges_take_a_round_others_progress_counts_a_round_later() -> None:
    links = Links(default=Link(latency=1.4))
    after = final_params(
        make_world(overlapped(outer_momentum=0.0), platforms=EVEN, links=links)
    )
    targets, left = TARGETS[:NUM_WORKERS], 0.9**3  # each step of 0.1 leaves 0.9 of the way
    model, progress = torch.zeros(NUM_PARAMS), torch.zeros(NUM_WORKERS, NUM_PARAMS)
    for _ in range(NUM_ROUNDS):
        learned = (1 - left) * (targets - (model + progress))
        model, progress = model + progress.mean(0), learned
    torch.testing.assert_close(after, (model + progress.mean(0)).expand_as(after))


def test_with_overlap_nobody_waits_for_short_exchanges() -> None:
    platforms, links = EVEN, Links(default=Link(latency=1.0))
    ends = {}
    for overlap in (False, True):
        simulator = make_world(squeezed(overlap=overlap), platforms=platforms, links=links)
        simulator.run()
        ends[overlap] = simulator.now
    training, exchanges = 3.0 * NUM_ROUNDS, 2.0
    assert ends[False] == pytest.approx(training + NUM_ROUNDS * exchanges, rel=0.01)
    assert ends[True] == pytest.approx(training + exchanges, rel=0.01)


@pytest.mark.parametrize(("latency", "beside"), [(0.01, 1), (0.9, 2), (1.4, 3), (5.0, 3)])
def test_with_overlap_as_few_steps_are_late_as_an_exchange_takes(
    latency: float, beside: int
) -> None:
    steps: list[int] = []

    def note(state: WorkerState, event: Event, _now: Seconds) -> None:
        if isinstance(event, Trained) and state.rank == 0:
            steps.append(event.num_steps)

    links = Links(default=Link(latency=latency))
    make_world(Watched(overlapped(), after=note), platforms=EVEN, links=links).run()
    # Nothing is known before the first round, and a step takes a second.
    divided = [part for part in (3 - beside, beside) if part]
    assert steps == [3, *divided * (NUM_ROUNDS - 1)]


def test_rounds_by_forecast_are_as_long_with_overlap_as_without() -> None:
    found = []
    for overlap in (False, True):
        steps = [0] * NUM_WORKERS

        def note(
            state: WorkerState, event: Event, _now: Seconds, steps: list[int] = steps
        ) -> None:
            if isinstance(event, Trained):
                steps[state.rank] += event.num_steps

        balanced = EdgeGossip(inner=squeezed(local_steps=9, overlap=overlap))
        make_world(Watched(balanced, after=note), platforms=UNEVEN).run()
        found.append(steps)
    assert found[0] == found[1]
    assert len({*found[0]}) > 1


@pytest.mark.parametrize("overlap", [False, True])
def test_rounds_by_forecast_end_together_while_speeds_drift(overlap: bool) -> None:
    platforms = [
        replace(each, throttling=drift(rank, most=4.0, step=30.0, period=3000.0))
        for rank, each in enumerate(EVEN)
    ]
    balanced = EdgeGossip(inner=squeezed(num_rounds=60, local_steps=16, overlap=overlap))
    world = make_world(balanced, platforms=platforms, size=2000)
    world.run()
    # One forecast for a pass would leave 0.58, because the slowest is another one each round.
    use = world.use(world.now)
    assert use is not None
    assert use.goodput > 0.85


def test_with_overlap_a_long_wait_is_used_for_the_next_round() -> None:
    steps, ahead = [0] * NUM_WORKERS, set()

    def note(state: WorkerState, event: Event, _now: Seconds) -> None:
        assert isinstance(state, DoubleSqueezeState)
        if isinstance(event, Trained):
            steps[state.rank] += event.num_steps
            if state.is_exchanging and state.overlap.is_ahead:
                ahead.add(state.rank)

    world = make_world(Watched(overlapped(), after=note), platforms=UNEVEN)
    after = final_params(world)
    assert all(torch.equal(each, after[0]) for each in after)
    assert steps == [NUM_ROUNDS * 3] * NUM_WORKERS
    speeds = [each.throughput for each in UNEVEN]
    assert speeds.index(max(speeds)) in ahead
    assert speeds.index(min(speeds)) not in ahead
