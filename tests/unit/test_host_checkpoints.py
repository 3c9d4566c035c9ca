"""Hosts go on from a checkpoint: to the last bit, and with what had no answer yet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS, SYNCHRONOUS
from tests.hosts import EPOCHS, Checkpoints, Slow, make_host
from tests.parity import SETTINGS, Steady, run_all, simulate
from tests.tiers import thorough

from edgegossip.algorithms.server.methods import ASP
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Assign,
    Assigned,
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Predict,
    Predicted,
    Rank,
    Seconds,
    Started,
    WorkerState,
)
from edgegossip.net.host.host import Host
from edgegossip.net.memory import MemoryNetwork


@thorough
@pytest.mark.parametrize("name", ["epoch-gossip", "gossip", "all-reduce"])
def test_a_run_that_was_stopped_goes_on_to_the_last_bit(name: str) -> None:
    algorithm = SYNCHRONOUS[name]
    _, states = simulate(algorithm)
    checkpoints = Checkpoints()

    def hosts(network: MemoryNetwork, *, is_resumed: bool) -> list[Host[Any]]:
        def stop_in_the_middle() -> None:
            if not is_resumed and made[2].state.round >= 3:
                for host in made:
                    host.stop()

        made: list[Host[Any]] = []
        for rank in range(NUM_WORKERS):
            trainer = Slow(rank, before=stop_in_the_middle if rank == 2 else None)
            options: dict[str, Any] = {"save": checkpoints.save}
            if is_resumed:
                options["checkpoint"] = checkpoints.get(rank)
            made.append(make_host(algorithm, rank, network, trainer, **options))
        return made

    assert "interrupted" in run_all(hosts(MemoryNetwork(), is_resumed=False))
    resumed = hosts(MemoryNetwork(), is_resumed=True)
    assert run_all(resumed) == ["finished"] * NUM_WORKERS
    for host, state in zip(resumed, states, strict=True):
        assert torch.equal(host.state.params, state.params)


@thorough
def test_servers_go_on_from_checkpoints_of_different_moments() -> None:
    served = ASP(num_workers=NUM_WORKERS - 2, num_rounds=24)
    algorithm = Shards(inner=served, num_servers=2)
    checkpoints = Checkpoints()

    def save(content: dict[str, Any]) -> bool:
        state = content["state"]
        # The disk of rank 0 is full before long: the others go on, and know later orders.
        is_late = state.rank == 0 and state.num_orders > 10
        return not is_late and checkpoints.save(content)

    def hosts(*, is_resumed: bool) -> list[Host[Any]]:
        network = MemoryNetwork()

        def stop_in_the_middle() -> None:
            if not is_resumed and made[2].state.round >= 12:
                for host in made:
                    host.stop()

        made: list[Host[Any]] = []
        for rank in range(NUM_WORKERS):
            options: dict[str, Any] = {
                "save": save,
                "settings": replace(SETTINGS, checkpoint_seconds=0.01, max_seconds=20.0),
                "checkpoint": checkpoints.get(rank) if is_resumed else None,
            }
            trainer = Slow(rank, before=stop_in_the_middle if rank == 2 else None)
            made.append(make_host(algorithm, rank, network, trainer, **options))
        return made

    assert "interrupted" in run_all(hosts(is_resumed=False))
    assert checkpoints[0]["state"].num_orders < checkpoints[1]["state"].num_orders
    resumed = hosts(is_resumed=True)
    assert run_all(resumed) == ["finished"] * NUM_WORKERS
    assert {host.state.round for host in resumed[2:]} == {24}


class Asking(Algorithm[WorkerState]):
    """Asks one question, and has finished when it is answered."""

    schema, role = EPOCHS.schema, EPOCHS.role

    def __init__(self, question: Effect) -> None:
        self.question = question
        self.is_asking: Callable[[], None] = lambda: None

    def init(self, rank: Rank, params: torch.Tensor) -> WorkerState:
        return WorkerState(rank=rank, params=params)

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                self.is_asking()
                return [self.question]
            case Predicted() | Evaluated() | Assigned():
                return [Finish()]
        return []


@pytest.mark.parametrize(
    "question", [Predict(), Evaluate(torch.zeros(1)), Assign((0, 1))], ids=type
)
def test_a_question_without_an_answer_is_asked_again(question: Effect) -> None:
    kept: list[dict[str, Any]] = []

    def save(content: dict[str, Any]) -> bool:
        kept.append(copy.deepcopy(content))
        return True

    def make(**options: Any) -> Host[Any]:  # noqa: ANN401
        return make_host(
            algorithm,
            0,
            MemoryNetwork(),
            forecaster=Steady(8.0),
            evaluate=lambda params: (0.5, 0.25),
            save=save,
            settings=replace(SETTINGS, meet_seconds=0.01, max_seconds=20.0),
            **options,
        )

    algorithm = Asking(question)
    first = make()
    # It is woken before it has the answer, and keeps a checkpoint if it can.
    algorithm.is_asking = lambda: first._inbox.put(None)
    assert first.run() == "finished"
    assert make(checkpoint=kept[0]).run() == "finished"
    assert len(kept[0]["work"]["asked"]) == (0 if isinstance(question, Assign) else 1)


@thorough
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "not kept"])
def test_messages_count_as_kept_only_once_the_checkpoint_is(is_kept: bool) -> None:
    network = MemoryNetwork()
    settings = replace(SETTINGS, checkpoint_seconds=0.1)

    def save(content: dict[str, Any]) -> bool:
        return is_kept

    hosts = [
        make_host(EPOCHS, rank, network, Slow(rank, 0.05), save=save, settings=settings)
        for rank in range(NUM_WORKERS)
    ]
    assert run_all(hosts) == ["finished"] * NUM_WORKERS
    for _, peer in hosts[0].peers:
        assert peer.received > 0
        assert (peer.kept > 0) == is_kept
        # What the others may need again is not forgotten before.
        assert bool(peer.log.entries and peer.log.entries[0][0] == 1) != is_kept
