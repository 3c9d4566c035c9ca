"""Promises of servers that share the model: one result, level loads, slices that agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import PARAMETER_SERVERS, server_in
from tests.effects import only
from tests.trials import trials
from tests.worlds import EVEN, NUM_PARAMS, TARGETS, UNEVEN, Recorder, joined, make_world
from torch import Tensor

from edgegossip.algorithms.server.methods import ASP, BSP
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.wrappers.batch_tune import BatchTune
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.shards.shard_leader import ShardLeaderState
from edgegossip.algorithms.wrappers.shards.shard_server import EVENTS, ShardServerState
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import (
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from edgegossip.contract.trainer import Trainer
from edgegossip.runs.experiment import algorithm_name
from edgegossip.runs.final_average import FinalAverage
from edgegossip.sim.fault import Crash, Drop, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

NUM = 3
LINKS = Links(default=Link(latency=0.25))

METHODS = {
    name: each
    for name, each in PARAMETER_SERVERS.items()
    if each.is_elementwise and each.robust is None and each.answers_whole
}

each_method = pytest.mark.parametrize("algorithm", METHODS.values(), ids=METHODS)


def sharded(algorithm: ParameterServer, num_servers: int, **settings: Any) -> Shards:  # noqa: ANN401
    """The same for `NUM` workers of so many servers."""
    inner = replace(algorithm, num_workers=NUM, **settings)
    return Shards(inner=inner, num_servers=num_servers)


def run(
    algorithm: ParameterServer | Shards,
    size: int = NUM_PARAMS,
    **options: Any,  # noqa: ANN401
) -> tuple[Simulator[Any], list[ShardServerState]]:
    """Run a world in which the i-th worker has the target i; give it and its servers."""
    num_servers = getattr(algorithm, "num_servers", 1)

    def make_trainer(rank: Rank, incarnation: int) -> Trainer:
        target = TARGETS[max(0, rank - num_servers)]
        return QuadraticTrainer(target.repeat(-(-size // NUM_PARAMS))[:size], 0.1)

    world: Simulator[Any] = Simulator(
        algorithm,
        EVEN[:1] * (num_servers + server_in(algorithm).num_workers),
        torch.zeros(size),
        make_trainer,
        links=options.pop("links", LINKS),
        evaluate=lambda params: (float(params.square().mean()) + 1.0, {}),
        **options,
    )
    assert world.run()
    return world, [state for state in world.states if isinstance(state, ShardServerState)]


def model(algorithm: ParameterServer | Shards, **options: Any) -> Tensor:  # noqa: ANN401
    world, _ = run(algorithm, **options)
    return torch.cat([*world.estimates().values()])


def require_agreement(servers: list[ShardServerState]) -> None:
    """Fail if servers count different commits, or have not carried out the same."""
    first, *others = servers
    for other in others:
        assert other.inner.num_commits == first.inner.num_commits
        assert other.inner.rounds == first.inner.rounds
        assert (other.epoch, other.num_orders) == (first.epoch, first.num_orders)


@pytest.mark.parametrize("num_servers", [2, 3])
@pytest.mark.parametrize("name", ["bsp", "fixed-adacomm"])
def test_so_many_servers_make_the_same_model_as_one(name: str, num_servers: int) -> None:
    one = replace(PARAMETER_SERVERS[name], num_workers=NUM, num_rounds=9)
    assert torch.equal(model(Shards(inner=one, num_servers=num_servers)), model(one))


@each_method
def test_servers_agree_on_every_commit(algorithm: ParameterServer) -> None:
    several = sharded(algorithm, 2, num_rounds=12)
    world, servers = run(several)
    require_agreement(servers)
    assert set(servers[0].inner.rounds.values()) == {12}
    assert {state.round for state in world.states} == {12}


@pytest.mark.parametrize("num_servers", [2, 3, 4])
def test_bytes_of_servers_are_level(num_servers: int) -> None:
    recorder = Traffic()
    served = BSP(num_workers=NUM, num_rounds=4)
    algorithm = Shards(inner=served, num_servers=num_servers)
    run(algorithm, size=100_001, observer=recorder)
    loads = [recorder.num_bytes[rank] for rank in range(num_servers)]
    assert max(loads) < 1.05 * min(loads)


class Traffic(Recorder):
    """Counts the bytes that each rank sends or is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[Rank] = Counter()

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        self.num_bytes[rank] += num_bytes
        self.num_bytes[receiver] += num_bytes


@each_method
@pytest.mark.parametrize("lost", [0, 1])
def test_server_that_restarts_has_its_slice_of_the_same_model_again(
    algorithm: ParameterServer, lost: Rank
) -> None:
    several = sharded(algorithm, 2, num_rounds=20)
    back = Faults(
        script=(Crash(at=9.3, rank=lost), Recover(at=9.9, rank=lost)), detection_time=0.2
    )
    _, servers = run(several, faults=back)
    require_agreement(servers)
    assert servers[0].epoch > 1
    assert set(servers[0].inner.rounds.values()) == {20}
    # It went on from a model that had learned something: a new one would be far behind.
    assert min(servers[0].inner.num_commits.values()) > 10


@each_method
def test_worker_that_is_lost_hangs_nobody(algorithm: ParameterServer) -> None:
    several = sharded(algorithm, 2, num_rounds=12)
    for at in (3.0, 3.3, 3.6, 3.9):
        gone = Faults(script=(Crash(at=at, rank=3),), detection_time=0.3)
        world, servers = run(several, faults=gone)
        require_agreement(servers)
        assert world.now < 200.0
        assert {state.round for state in world.states if state.rank != 3} == {12}


def test_worker_that_was_cut_off_from_all_servers_hangs_nobody() -> None:
    algorithm = Shards(inner=BSP(num_workers=NUM, num_rounds=12), num_servers=2)
    cut = Faults(script=(Partition(start=3.0, end=9.0, group=(4,)),), detection_time=0.3)
    world, servers = run(algorithm, faults=cut)
    require_agreement(servers)
    assert {state.round for state in world.states} == {12}


@each_method
def test_servers_agree_though_three_in_ten_messages_are_lost(
    algorithm: ParameterServer,
) -> None:
    several = sharded(algorithm, 3, num_rounds=8, resend_after=2.0)
    _, servers = run(several, faults=Faults(script=(Drop(probability=0.3),)))
    require_agreement(servers)
    assert set(servers[0].inner.rounds.values()) == {8}


def test_order_without_an_answer_is_repeated_alone_and_ever_later() -> None:
    algorithm = sharded(BSP(num_workers=NUM, num_rounds=5), 2, resend_after=2.0)
    state = algorithm.init(0, torch.zeros(NUM_PARAMS))
    effects = algorithm.handle(state, Started(), 0.0)
    order, timer = only(Send, effects), only(SetTimer, effects)
    assert (order.receiver, order.message.kind, timer.at) == (1, "order", 2.0)
    effects = algorithm.handle(state, TimerFired(timer.name), 2.0)
    assert only(Send, effects).message is order.message
    assert only(SetTimer, effects).at > 4.0


def test_server_that_is_to_merge_what_it_does_not_hold_says_that_it_cannot() -> None:
    algorithm = Shards(inner=BSP(num_workers=NUM, num_rounds=5), num_servers=2)
    state = algorithm.init(1, torch.zeros(NUM_PARAMS))
    algorithm.handle(state, Started(), 0.0)
    names = ("index", "chain", "num_looked", "at", "life", "serial", "number", "round")
    numbers = {
        **dict.fromkeys(names, 0),
        "epoch": 1,
        "worker": 1,
        "what": EVENTS.index("commit"),
    }
    order = Message("order", 0, numbers=numbers)
    report = only(Send, algorithm.handle(state, Received(0, order), 1.0)).message
    assert report.kind == "holds"
    assert (report.numbers["num_orders"], report.numbers["is_astray"]) == (0, 1)


@pytest.mark.parametrize("lost", [0, 1])
def test_workers_give_up_on_any_server_that_does_not_come_back(lost: Rank) -> None:
    algorithm = Shards(inner=ASP(num_workers=NUM, num_rounds=500, patience=30.0), num_servers=2)
    gone = Faults(script=(Crash(at=5.0, rank=lost),), detection_time=0.5)
    with pytest.raises(ServerLostError, match="waited 30 s for"):
        run(algorithm, faults=gone)


def test_one_server_measures_the_whole_model() -> None:
    algorithm = sharded(PARAMETER_SERVERS["adsp"], 2, num_rounds=30)
    world, servers = run(algorithm)
    assert trials(world.states[0])
    assert isinstance(servers[0], ShardLeaderState)
    assert servers[0].num_looked > 7
    # What was found is known to all.
    assert len(trials(world.states[1])) == len(trials(world.states[0]))


def test_what_workers_end_with_is_joined_from_all_slices() -> None:
    algorithm = Shards(inner=BSP(num_workers=NUM, num_rounds=5), num_servers=2)
    world = make_world(FinalAverage(inner=algorithm, num_workers=5), platforms=UNEVEN)
    assert world.run()
    final = torch.stack([state.estimate for state in world.states])
    assert torch.equal(final, final[:1].expand(5, -1))
    alone = make_world(algorithm, platforms=UNEVEN)
    assert alone.run()
    assert torch.equal(joined(alone.estimates())[0], final[0])


def test_settings_that_do_not_go_together_are_refused() -> None:
    served = BSP(num_workers=3, num_rounds=5)
    several, elected = Shards(inner=served, num_servers=2), Standby(inner=served)
    with pytest.raises(ValueError, match="BatchTune needs a parameter server"):
        BatchTune(inner=several)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got Standby; leave out Standby or Shards"):
        Shards(inner=elected, num_servers=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got Shards; leave out Shards or Standby"):
        Standby(inner=several)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Shards has slices"):
        EdgeGossip(inner=several)
    with pytest.raises(ValueError, match="num_servers must be at least 2"):
        Shards(inner=served, num_servers=1)


def test_runs_are_named_after_the_method_and_not_after_its_servers() -> None:
    served = BSP(num_workers=3, num_rounds=5)
    for algorithm in (served, Standby(inner=served), Shards(inner=served, num_servers=2)):
        assert algorithm_name(algorithm) == "bsp"
