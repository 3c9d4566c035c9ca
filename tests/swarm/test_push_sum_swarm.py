"""Random worlds with loss, crashes and cuts: push-sum loses no mass, and makes none."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.algorithms import ALGORITHMS
from tests.invariants import MAX_EVENTS
from tests.random_worlds import MANY_SEEDS, SEEDS, draw_world
from tests.tiers import first, thorough
from tests.worlds import NUM_PARAMS, Recorder, Watched, make_world
from torch import Tensor

from edgegossip.algorithms.push_sum.push_sum import Mass, PushSum
from edgegossip.contract.protocol import (
    Event,
    Rank,
    Received,
    Seconds,
    Started,
    Trained,
    WorkerLost,
    WorkerState,
)
from edgegossip.sim.simulator import Simulator

NAMES = [name for name, algorithm in ALGORITHMS.items() if isinstance(algorithm, PushSum)]


@dataclass
class Total:
    """A sum of numerators, [num_params] float64, and one of weights."""

    params: Tensor = field(default_factory=lambda: torch.zeros(NUM_PARAMS, dtype=torch.float64))
    weight: float = 0.0

    def add(self, mass: Mass) -> None:
        self.params = self.params + mass.share * mass.vector.double()
        self.weight += mass.weight

    def require(self, other: Total) -> None:
        assert self.weight == pytest.approx(other.weight, abs=1e-9)
        torch.testing.assert_close(self.params, other.params, atol=1e-5, rtol=1e-5)


@dataclass
class Ledger(Recorder):
    """Adds up what all workers have and what is under way, before and after each event.

    Under way is what its sender keeps until it is acknowledged, and its receiver has not taken
    in. Three things change the sums, and nothing else: training; a crash and a return; and mass
    of a link that was cut, if it is taken back, or arrives, although its other end has it.
    """

    simulator: Simulator[Any] = field(init=False)
    crashed: set[Rank] = field(default_factory=set)
    taken_in: dict[tuple[Rank, Rank, Seconds], int] = field(default_factory=dict)
    expected: Total | None = None
    num_events: int = 0

    def before(self, state: WorkerState, event: Event, now: Seconds) -> None:
        self.num_events += 1
        assert self.num_events < MAX_EVENTS, "it goes on for ever"
        total = self.total()
        if self.expected is not None:
            total.require(self.expected)
        self.expected = self.foresee(total, state, event)

    def after(self, state: Any, event: Event, now: Seconds) -> None:  # noqa: ANN401
        assert state.weight > 0
        assert bool(state.estimate.isfinite().all())
        for sender, link in state.links.inlets.items():
            self.taken_in[sender, state.rank, link.session] = link.next_round
        # Sends have been booked when this is called: what they give away is under way.
        total = self.total()
        if self.expected is not None:
            total.require(self.expected)
        self.expected = total

    def changed(self, now: Seconds, rank: Rank, what: str) -> None:
        super().changed(now, rank, what)
        if what == "crashed":
            self.crashed.add(rank)
        elif what == "recovered":
            self.crashed.discard(rank)
        self.expected = None

    def total(self) -> Total:
        total = Total()
        for state in self.simulator.states:
            if state.rank in self.crashed:
                continue
            total.add(Mass(state.rank, -1, state.params, 1.0, state.weight))
            for mass in state.arrived:
                total.add(mass)
            for receiver, link in state.links.outlets.items():
                for number, waiting in link.awaiting.items():
                    if not self.is_taken_in(state.rank, receiver, link.session, number):
                        total.add(waiting.content)
        return total

    def is_taken_in(self, one: Rank, other: Rank, session: Seconds, number: int) -> bool:
        return number < self.taken_in.get((one, other, session), -2)

    def foresee(self, total: Total, state: Any, event: Event) -> Total | None:  # noqa: ANN401
        """The sums after `event`; None where a worker or a link begins anew."""
        match event:
            case Started(has_rejoined=True):
                return None
            case Received(sender, message) if "weight" in message.numbers:
                session = message.numbers["session"]
                return total if self.is_of_now(sender, state.rank, session) else None
            case Trained():
                trained = state.weight * event.params.double() - state.params.double()
                total.params = total.params + trained
            case WorkerLost(rank) if rank in state.links.outlets:
                link = state.links.outlets[rank]
                for number, waiting in link.awaiting.items():
                    if self.is_taken_in(state.rank, rank, link.session, number):
                        total.add(waiting.content)
        return total

    def is_of_now(self, sender: Rank, receiver: Rank, session: Seconds) -> bool:
        """Whether a link is still in a session, and its sender in the life that began it."""
        state = self.simulator.states[sender]
        is_first_life = state.links.first_session == 0
        link = state.links.outlets.get(receiver)
        is_alive = sender not in self.crashed and (session > 0 or is_first_life)
        return is_alive and link is not None and link.session == session


def check_world(name: str, seed: int) -> None:
    world = draw_world(ALGORITHMS[name], seed)
    draw = random.Random(f"{seed} push-sum")
    algorithm: Any = world.algorithm
    timeout = draw.choice([None, draw.uniform(0.1, 10)])
    resend_after = algorithm.resend_after or draw.uniform(0.5, 10)
    algorithm = replace(algorithm, timeout=timeout, resend_after=resend_after)
    ledger = Ledger()
    ledger.simulator = make_world(
        Watched(algorithm, before=ledger.before, after=ledger.after),
        platforms=world.platforms,
        links=world.links,
        faults=world.faults,
        observer=ledger,
        wire=world.wire,
        lr=0.3,
    )
    try:
        assert ledger.simulator.run()
        for state in ledger.simulator.states:
            if state.rank not in ledger.crashed:
                assert state.round == algorithm.total_rounds
                assert not state.arrived
    except Exception as error:
        error.add_note(f"{name} in world {seed}: {algorithm} in {world}")
        raise


@thorough
@pytest.mark.parametrize("name", first(2, NAMES))
def test_mass_is_neither_lost_nor_made(name: str) -> None:
    check_world(name, SEEDS[0])


@thorough
@pytest.mark.parametrize("name", NAMES)
def test_mass_is_neither_lost_nor_made_in_some_more_worlds(name: str) -> None:
    for seed in SEEDS[1:]:
        check_world(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mass_is_neither_lost_nor_made_in_very_many_worlds(name: str) -> None:
    for seed in MANY_SEEDS:
        check_world(name, seed)
