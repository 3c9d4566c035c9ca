"""Limit cases that tie algorithms together, and properties that all of them share."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.algorithms import (
    ALGORITHMS,
    ALONE,
    ASYNCHRONOUS,
    EDGE_SQUEEZE,
    NUM_WORKERS,
    PLAIN,
    REGIONS,
    STAGES,
    UNTIMED,
    AnyAlgorithm,
    AnyServer,
    each_algorithm,
    each_of_all,
    each_synchronous,
    server_in,
    with_settings,
)
from tests.arrivals import require_that_arrivals_count
from tests.host_wrappers import Inside
from tests.tiers import by_name, first, thorough
from tests.worlds import (
    EVEN,
    NUM_PARAMS,
    TARGETS,
    UNEVEN,
    Recorder,
    Watched,
    final_params,
    joined,
    make_world,
)
from torch import Tensor

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.gossip.streaming_diloco import StreamingDiLoCo
from edgegossip.algorithms.server.halos import HALoS
from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.wrappers.averaged_moments import AveragedMoments
from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.compression.compressor import Identity
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Rank,
    Seconds,
    Steps,
    Train,
    Trained,
    WorkerJoined,
    WorkerState,
)
from edgegossip.contract.rounds import RoundBased
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.contract.topology import Topology, complete, ring
from edgegossip.recipes.edge_squeeze import edge_squeeze
from edgegossip.sim.fault import Crash, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.sim.pool import ComputePool
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

UNEVEN_LINKS = Links(
    default=Link(latency=0.2, bandwidth=1e4),
    overrides={(0, 1): Link(latency=9.0), (3, 2): Link(latency=0.1, bandwidth=40.0)},
)


@cache
def uneven_run(algorithm: Algorithm[Any]) -> tuple[Simulator[Any], Recorder, Tensor]:
    """A run with which others are compared, on uneven platforms, and its last parameters."""
    recorder = Recorder()
    world = make_world(algorithm, platforms=UNEVEN, links=UNEVEN_LINKS, observer=recorder)
    return world, recorder, final_params(world)


# Limit cases.


@pytest.mark.parametrize("local_steps", [1, 3])
def test_gossip_on_the_complete_graph_is_all_reduce(local_steps: int) -> None:
    graph = complete(5)
    gossip = Gossip(topology=graph, num_rounds=4, local_steps=local_steps)
    all_reduce = AllReduce(topology=graph, num_rounds=4, local_steps=local_steps)
    torch.testing.assert_close(
        final_params(make_world(gossip)), final_params(make_world(all_reduce))
    )


def test_epoch_gossip_is_gossip_where_an_epoch_is_one_step() -> None:
    arguments: dict[str, Any] = {"topology": ring(5), "num_rounds": 4}
    one, other = EpochGossip(**arguments), Gossip(**arguments)
    assert torch.equal(final_params(make_world(one)), final_params(make_world(other)))


def test_gosgd_that_never_pushes_trains_alone() -> None:
    algorithm = GoSGD(topology=complete(5), num_rounds=7, exchange_probability=0.0)
    after = final_params(make_world(algorithm))
    alone = [train_alone(rank, num_rounds=7, work=Steps(1)) for rank in range(5)]
    assert torch.equal(after, torch.stack(alone))


ROUNDS: dict[str, Any] = {"num_rounds": 6, "local_steps": 3, "outer_momentum": 0.7}


def diloco(num_workers: int) -> Tensor:
    """The last parameters of DiLoCo on the complete graph, with outer momentum."""
    algorithm = DiLoCo(topology=complete(num_workers), **ROUNDS)
    return final_params(make_world(algorithm, platforms=EVEN[:num_workers]))


def test_double_squeeze_without_compression_is_diloco_on_the_complete_graph() -> None:
    algorithm = DoubleSqueeze(topology=complete(5), **ROUNDS)
    torch.testing.assert_close(final_params(make_world(algorithm)), diloco(5))


@pytest.mark.parametrize("block_share", [0.125, 1.0])
def test_edge_squeeze_of_one_worker_without_compression_is_diloco_alone(
    block_share: float,
) -> None:
    algorithm = replace(
        edge_squeeze(1, compressor=Identity(), **ROUNDS), block_share=block_share
    )
    world = make_world(algorithm, platforms=EVEN[:1])
    torch.testing.assert_close(final_params(world), diloco(1))


def test_streaming_diloco_of_one_worker_and_one_fragment_is_diloco_alone() -> None:
    algorithm = StreamingDiLoCo(topology=complete(1), num_fragments=1, **ROUNDS)
    world = make_world(algorithm, platforms=EVEN[:1])
    torch.testing.assert_close(final_params(world), diloco(1))


def test_one_that_has_lost_all_others_takes_no_step_beside_an_exchange() -> None:
    steps: list[int] = []

    def note(state: WorkerState, event: Event, now: Seconds) -> None:
        if isinstance(event, Trained) and state.rank == 0 and now > 10.0:
            steps.append(event.num_steps)

    algorithm = DoubleSqueeze(topology=complete(3), overlap=True, **ROUNDS)
    faults = Faults(script=(Crash(at=5.0, rank=1), Crash(at=5.0, rank=2)))
    make_world(Watched(algorithm, after=note), platforms=EVEN[:3], faults=faults).run()
    assert steps
    assert {*steps} == {ROUNDS["local_steps"]}


@each_algorithm
def test_one_worker_alone_is_plain_sgd(algorithm: AnyAlgorithm) -> None:
    if isinstance(algorithm, AnyServer):
        require_sgd_of_one_committer(algorithm)
        return
    local_steps = getattr(algorithm, "local_steps", 1)
    plain = PLAIN.get(type(algorithm), {})
    lonely = replace(algorithm, topology=complete(1), **plain)
    after = final_params(make_world(lonely, platforms=[Platform(throughput=1.0)]))
    expected = train_alone(0, algorithm.num_rounds, Steps(local_steps))
    tolerance = 1e-6 if plain else 0.0  # to add up what has changed rounds
    torch.testing.assert_close(after[0], expected, rtol=0.0, atol=tolerance)


def require_sgd_of_one_committer(algorithm: AnyServer) -> None:
    """Fail if the server's model is not what all committed steps make of the first one."""
    if isinstance(algorithm, Standby):
        algorithm = replace(algorithm, num_standbys=1)
    plain = PLAIN.get(type(server_in(algorithm)), {})
    lonely = with_settings(algorithm, num_workers=1, **plain)
    rank = getattr(algorithm, "num_servers", 1)
    platforms = EVEN[: rank + 1]
    world = make_world(lonely, platforms=platforms, links=Links(default=Link(latency=0.25)))
    assert world.run()
    first = world.states[0]
    server = getattr(first, "inner", getattr(first, "server", first))
    assert isinstance(server, ServerState)
    assert server.num_steps[1] >= server_in(algorithm).num_rounds
    expected = train_alone(rank, server.num_steps[1], Steps(1))
    (model,) = joined(world.estimates())
    torch.testing.assert_close(model, expected, rtol=0.0, atol=1e-6)


def train_alone(rank: Rank, num_rounds: int, work: Steps) -> Tensor:
    params = torch.zeros(NUM_PARAMS)
    for _ in range(num_rounds):
        params = QuadraticTrainer(TARGETS[rank]).train(Train(params, work)).params
    return params


# Properties that all share.


@each_of_all
def test_equal_arguments_give_equal_traces_and_bits(algorithm: Algorithm[Any]) -> None:
    _, first, expected = uneven_run(algorithm)
    second = Recorder()
    again = make_world(algorithm, platforms=UNEVEN, links=UNEVEN_LINKS, observer=second)
    assert torch.equal(final_params(again), expected)
    assert first.trace == second.trace


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_what_arrives_during_training_is_not_lost(name: str) -> None:
    require_that_arrivals_count(ASYNCHRONOUS[name])


@pytest.mark.parametrize("algorithm", by_name(UNTIMED))
def test_speed_and_links_change_the_time_but_not_the_result(algorithm: Algorithm[Any]) -> None:
    even = make_world(algorithm)
    uneven, _, params = uneven_run(algorithm)
    assert torch.equal(final_params(even), params)
    assert uneven.now > even.now


@each_of_all
def test_codec_changes_nothing(algorithm: Algorithm[Any]) -> None:
    plain, _, params = uneven_run(algorithm)
    wired = make_world(algorithm, platforms=UNEVEN, links=UNEVEN_LINKS, wire=True)
    assert torch.equal(final_params(wired), params)
    assert plain.now == wired.now
    assert plain.num_events == wired.num_events


@each_of_all
def test_threads_change_nothing(algorithm: Algorithm[Any]) -> None:
    _, _, plain = uneven_run(algorithm)
    with ComputePool(num_threads=2) as pool:
        threaded = make_world(algorithm, platforms=UNEVEN, links=UNEVEN_LINKS, pool=pool)
        assert torch.equal(final_params(threaded), plain)


@each_of_all
def test_what_was_sent_never_changes(algorithm: Algorithm[Any]) -> None:
    _, recorder, _ = uneven_run(algorithm)
    assert recorder.messages
    recorder.require_unchanged_payloads()


@each_of_all
def test_starting_parameters_are_not_written_to(algorithm: Algorithm[Any]) -> None:
    params = torch.zeros(NUM_PARAMS)
    states = [algorithm.init(rank, params) for rank in range(NUM_WORKERS)]
    world = make_world(algorithm)
    world.states[:] = states
    assert world.run()
    assert torch.equal(params, torch.zeros(NUM_PARAMS))


@dataclass
class Twice(Inside):
    """Handles each event with a copy of the state too, which must come to the same.

    The copy is made in two ways, by turns.
    """

    count: Iterator[int] = field(default_factory=itertools.count)

    def handle(self, state: Any, event: Event, now: Seconds) -> list[Effect]:  # noqa: ANN401
        is_kept = next(self.count) % 2
        other = assemble(*dismantle(state)) if is_kept else copy.deepcopy(state)
        effects = self.inner.handle(state, event, now)
        answer = self.inner.handle(other, event, now)
        assert flatten(*dismantle((other, answer))) == flatten(*dismantle((state, effects)))
        return effects


def flatten(plain: Any, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401
    """`plain` with the values of its tensors in place.

    Which of them are one and the same object may differ; how they are nested may not.
    """
    match plain:
        case list():
            return [flatten(element, tensors) for element in plain]
        case {"tensor": name}:
            return tensors[name].tolist()
        case dict():
            return {key: flatten(value, tensors) for key, value in plain.items()}
    return plain


FEWER = EdgeGossip(inner=EpochGossip(topology=ring(3), num_rounds=2), block_share=0.5)


KEPT = {
    **ALGORITHMS,
    **STAGES,
    **REGIONS,
    "alone": ALONE,
    "balanced": FEWER,
    "edge-squeeze": EDGE_SQUEEZE,
    "controlled": ControlVariates(inner=FEWER),
    "moments": AveragedMoments(inner=FEWER, first_period=1, second_period=2),
}


@pytest.mark.parametrize("algorithm", by_name(KEPT))
def test_state_survives_being_copied_and_kept_at_any_event(algorithm: Algorithm[Any]) -> None:
    faults = Faults(script=(Crash(at=2.5, rank=1), Recover(at=5.0, rank=1)))
    topology = algorithm.traits.topology
    platforms = UNEVEN[: topology.num_workers] if topology is not None else UNEVEN
    world = make_world(Twice(algorithm), platforms=platforms, links=UNEVEN_LINKS, faults=faults)
    assert world.run()


@each_synchronous
def test_generous_timeout_changes_nothing(algorithm: RoundBased[Any]) -> None:
    patient = make_world(replace(algorithm, timeout=1e6), platforms=UNEVEN, links=UNEVEN_LINKS)
    assert torch.equal(final_params(patient), uneven_run(algorithm)[2])


@each_of_all
def test_worker_that_comes_back_ends_where_the_others_do(algorithm: Algorithm[Any]) -> None:
    faults = Faults(script=(Crash(at=2.5, rank=1), Recover(at=5.0, rank=1)))
    recorder = Recorder()
    world = make_world(algorithm, faults=faults, observer=recorder)
    assert world.run()
    own = [what for _, rank, what in recorder.trace if rank == 1]
    assert "finished" in own[own.index("recovered") :]
    rounds = {state.round for state in world.states if counts_rounds(algorithm, state.rank)}
    assert len(rounds) == 1


def counts_rounds(algorithm: Algorithm[Any], rank: Rank) -> bool:
    """Say whether it has rounds of its own: stages above the first know of theirs only, and
    servers of regions know those of their workers.
    """
    if isinstance(algorithm, HALoS):
        return rank > algorithm.num_regions
    return not isinstance(algorithm, Stages) or algorithm.stage(rank) == 0


@each_of_all
def test_worker_that_stays_away_does_not_stop_the_others(algorithm: Algorithm[Any]) -> None:
    # No server, which all would wait for.
    away = 1 if isinstance(algorithm, Stages) else NUM_WORKERS - 1
    world = make_world(algorithm, faults=Faults(script=(Crash(at=2.5, rank=away),)))
    if isinstance(algorithm, Pipelined) and algorithm.stage(away) > 0:
        with pytest.raises(ServerLostError):  # nobody else has this part of the model
            world.run()
        return
    assert world.run()
    others = [state for state in world.states if state.rank != away]
    finished = {each.round for each in others if counts_rounds(algorithm, each.rank)}
    assert len(finished) == 1


@each_synchronous
def test_all_crash_together_and_start_over(algorithm: RoundBased[Any]) -> None:
    script = [Crash(at=2.5, rank=rank) for rank in range(NUM_WORKERS)]
    back = [Recover(at=4.0 + rank % 2, rank=rank) for rank in range(NUM_WORKERS)]
    world = make_world(algorithm, faults=Faults(script=(*script, *back)))
    assert world.run()
    assert {state.round for state in world.states} == {algorithm.total_rounds}


@each_of_all
def test_crash_before_the_start_and_return_at_once_does_no_harm(
    algorithm: Algorithm[Any],
) -> None:
    faults = Faults(script=(Crash(at=0.0, rank=2), Recover(at=0.0, rank=2)))
    assert make_world(algorithm, faults=faults).run()


def test_neighbors_that_catch_up_after_a_common_crash_do_not_wait_for_each_other() -> None:
    # On a ring, ranks 0 and 1 come back to neighbors that are several rounds apart.
    platforms = [Platform(throughput=speed) for speed in (1.0, 1.0, 0.2, 1.0, 1.0, 5.0)]
    script = [Crash(at=0.5, rank=0), Crash(at=0.5, rank=1)]
    script_back = [Recover(at=8.0, rank=0), Recover(at=8.1, rank=1)]
    faults = Faults(script=(*script, *script_back), detection_time=0.1)
    links = Links(default=Link(latency=0.2))
    algorithm = Gossip(topology=ring(6), num_rounds=12)
    world = make_world(algorithm, platforms=platforms, faults=faults, links=links)
    assert world.run()
    assert {state.round for state in world.states} == {12}


@each_synchronous
@pytest.mark.parametrize(
    "partition",
    by_name(
        {
            # Over before anybody could notice it.
            "short": Partition(start=1.2, end=1.4, group=(1,)),
            "long": Partition(start=1.2, end=9.0, group=(1,)),
        },
        ["short"],
    ),
)
def test_return_behind_a_partition_is_noticed_once_it_is_over(
    algorithm: RoundBased[Any], partition: Partition
) -> None:
    script = (Crash(at=1.1, rank=1), partition, Recover(at=1.3, rank=1))
    joined: list[tuple[Rank, WorkerJoined]] = []

    def note(state: WorkerState, event: Event, now: Seconds) -> None:
        if isinstance(event, WorkerJoined):
            joined.append((state.rank, event))

    longer = Watched(replace(algorithm, num_rounds=20), before=note)
    world = make_world(longer, faults=Faults(script=script))
    assert world.run()
    # The others have forgotten nothing; it has.
    meets = [(1, WorkerJoined(j)) for j in (0, 2, 3, 4)]
    is_met = [(j, WorkerJoined(1, has_restarted=True)) for j in (0, 2, 3, 4)]
    assert sorted(joined, key=repr) == sorted(meets + is_met, key=repr)
    for state in world.states:
        assert not state.lost
        # All neighbors are waited for again.
        for j in algorithm.topology.all_in_neighbors(state.rank):
            assert math.isfinite(state.first_exchange.get(j, 0))


@thorough
@pytest.mark.parametrize("topology", first(1, [ring(2), ring(3), complete(2)]), ids=repr)
def test_smallest_worlds_work(topology: Topology) -> None:
    platforms = [Platform(throughput=1.0)] * topology.num_workers
    after = final_params(
        make_world(Gossip(topology=topology, num_rounds=200), platforms=platforms)
    )
    torch.testing.assert_close(after.mean(0), TARGETS[: topology.num_workers].mean(0))
