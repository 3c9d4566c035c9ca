"""A worker sends only what its schema describes, in the simulator and on a network."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.host_runs import Run
from tests.host_worlds import World
from tests.round_worker import Worker
from tests.small_runs import small_run
from tests.virtual_network import Wire
from tests.worlds import NUM_PARAMS, ManySamples
from torch import Tensor

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.choco_gossip import ChocoGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.compression.sparse import TopK
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Message, Payload, Rank, Received, Started
from edgegossip.contract.rounds import RoundState
from edgegossip.contract.schema import MessageSpec
from edgegossip.contract.topology import complete
from edgegossip.real.launch import launch
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator

NUM_WORKERS = 3
ROUNDS: dict[str, Any] = {"topology": complete(NUM_WORKERS), "num_rounds": 6}


@dataclass(frozen=True, kw_only=True)
class Silent(Gossip):
    """Sends its model in even rounds only, and notes whom it has heard."""

    heard: list[tuple[int, list[Rank]]] = field(default_factory=list, compare=False)

    def outgoing(self, state: RoundState, receiver: Rank) -> Payload:
        return {} if state.round % 2 else super().outgoing(state, receiver)

    def mix(self, state: RoundState, inbox: Mapping[Rank, Payload]) -> None:
        self.heard.append((state.round, [*inbox]))
        super().mix(state, inbox)


@dataclass(frozen=True, kw_only=True)
class Mistaken(Gossip):
    """Sends, from the third round on, what its schema does not describe."""

    def outgoing(self, state: RoundState, receiver: Rank) -> Payload:
        payload = super().outgoing(state, receiver)
        return payload if state.round < 2 else {**payload, "loss": torch.ones(())}


@dataclass(frozen=True, kw_only=True)
class Undescribed(Mistaken):
    """Has no schema."""

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        return Algorithm.schema(self, params)


def simulated(algorithm: Algorithm[Any]) -> Simulator[Any]:
    world = Simulator(
        algorithm,
        [Platform(throughput=10.0)] * NUM_WORKERS,
        torch.zeros(NUM_PARAMS),
        lambda rank, incarnation: ManySamples(rank, 0.1, 4),
    )
    world.run()
    return world


def on_a_network(algorithm: Algorithm[Any]) -> Run:
    run = Run(
        World(
            seed=0,
            name="sent",
            algorithm=algorithm,
            step_seconds=(0.01,) * NUM_WORKERS,
            start_at=(0.0,) * NUM_WORKERS,
            wire=Wire(),
            disturbances=(),
            meet_seconds=10.0,
            checkpoint_seconds=math.inf,
        )
    )
    run.to_the_end()
    return run


WRONG = (
    r"worker \d sent a message 'params' that .* not describe: unknown tensor 'loss'.*optional"
)


def test_the_simulator_names_a_message_that_the_schema_does_not_describe() -> None:
    with pytest.raises(LocalProtocolError, match=WRONG):
        simulated(Mistaken(**ROUNDS))


def test_a_host_names_its_own_message_that_the_schema_does_not_describe() -> None:
    reasons = [each.reason for each in on_a_network(Mistaken(**ROUNDS)).processes.values()]
    assert len(reasons) == NUM_WORKERS
    for reason in reasons:
        assert isinstance(reason, LocalProtocolError)
        assert re.search(WRONG, str(reason))


def test_an_algorithm_without_a_schema_may_send_anything_in_the_simulator() -> None:
    world = simulated(Undescribed(**ROUNDS))
    assert [state.round for state in world.states] == [6] * NUM_WORKERS


def test_a_kind_that_the_schema_lacks_is_named() -> None:
    class Chatty(Gossip):
        def message(self, kind: str, exchange: int, payload: Payload) -> Message:
            return super().message("gossip", exchange, payload)

    with pytest.raises(LocalProtocolError, match=r"'gossip' .* only the kinds \['params', 'ca"):
        simulated(Chatty(**ROUNDS))


def test_a_worker_sends_nothing_in_a_round_with_an_empty_payload() -> None:
    one, other = Silent(**ROUNDS), Silent(**ROUNDS)
    world, run = simulated(one), on_a_network(other)
    others = {rank: [j for j in range(NUM_WORKERS) if j != rank] for rank in range(NUM_WORKERS)}
    expected = [(k, [] if k % 2 else others[rank]) for k in range(6) for rank in others]
    assert sorted(one.heard) == sorted(other.heard) == sorted(expected)
    for rank, process in run.processes.items():
        assert process.reason == "finished"
        assert process.host.refusals == {}
        assert torch.equal(process.host.state.params, world.states[rank].params)


@pytest.mark.parametrize("algorithm", [Gossip(**ROUNDS), AllReduce(**ROUNDS)], ids=type)
def test_an_empty_payload_where_none_is_usual_ends_nobody(algorithm: Any) -> None:  # noqa: ANN401
    worker = Worker(algorithm)
    worker.on(Started())
    worker.trains_to(3.0)
    for sender in range(1, NUM_WORKERS):
        worker.on(Received(sender, Message("params", 0, {})))
    assert worker.state.params.isfinite().all()


def test_an_algorithm_that_needs_each_payload_accepts_no_empty_one() -> None:
    choco = ChocoGossip(**ROUNDS, compressor=TopK(0.5))
    spec = choco.schema(torch.zeros(NUM_PARAMS))["params"]
    assert "is missing" in (spec.mismatch({}) or "")


def test_launch_names_a_missing_schema_before_it_starts_a_process(tmp_path: Path) -> None:
    undescribed = Undescribed(topology=complete(4), num_rounds=1)
    experiment = replace(small_run(), algorithm=undescribed, evaluation_interval=None)

    def command(*arguments: Any) -> list[str]:  # noqa: ANN401
        raise AssertionError("a process is started")

    with pytest.raises(LocalProtocolError, match="Undescribed does not describe its messages"):
        launch(experiment, command, out=tmp_path)
    assert not (tmp_path / "workers").exists()
