"""ClaimedWork: any gossip algorithm, on data that all workers can read and divide by speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgegossip.algorithms.wrappers.claimed.claims import Ledger, receivers
from edgegossip.algorithms.wrappers.claimed.state import PATIENCE, ClaimedState, Weight
from edgegossip.algorithms.wrappers.inner import num_workers_in, require_fixed_roles
from edgegossip.algorithms.wrappers.pieces import Pieces
from edgegossip.contract import (
    Effect,
    Epochs,
    Event,
    Finish,
    LocalProtocolError,
    Message,
    MessageSpec,
    Note,
    Predict,
    Predicted,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TensorSpec,
    TimerFired,
    Train,
    Trained,
    Traits,
    Units,
    WorkerJoined,
    WorkerLost,
    Wrapper,
    check_ranges,
)

MOST_UNITS = 2**13  # larger data sets have larger units
_MOST_GIFTS = 2**9  # of one worker in one epoch


@dataclass(frozen=True, kw_only=True)
class ClaimedWork(Wrapper[ClaimedState]):
    r"""Let the present workers divide each epoch of shared data among themselves, by speed.

    The data is `Shared`: every worker can read every sample, and each epoch divides the samples
    into units anew. Worker :math:`i` owns the units in which its score

    .. math:: -w_i / \ln h(u, i)

    is the highest, where :math:`w_i` is its forecast throughput, and the hash :math:`h` is
    uniform in (0, 1). The inner algorithm asks for epochs or steps, and does not notice:

    - `Epochs` become the worker's units, done a few at a time, and end when all units of all
      workers are done. All workers so finish an epoch together.
    - `Steps(n)` become the whole number of units nearest to :math:`n` steps, at least one in
      each round, also if a round asks twice. If workers wait for each other, :math:`n` is first
      scaled with the worker's relative speed. A worker that owns nothing more begins the next
      epoch at once.

    After each of these trainings, a worker tells the others what it has done and its newest
    forecast. If it will not finish its units by the time at which all could, it gives the
    surplus to others. The units of a lost worker wait for two epochs, since it may be doing
    them out of reach, and are then claimed by the others. No sample is visited twice unless
    messages are lost or the network is cut for longer; see :doc:`Claimed work
    </docs/claimed-work>`, also for what returning and lying workers do.

    Data that is not shared is left to the inner algorithm.

    Args:
        inner: Any algorithm with a `topology`, whose workers have whole models.
        seed: Seed of the hash.
        block_share: Share of its remaining units that a worker does between two reports, in
            (0, 1].
        max_ratio: Limit on a worker's weight, in multiples of the median, at least 1. It bounds
            the share of an epoch that a lying worker can claim.

    Raises:
        ValueError: If a number is out of range, or `inner` has no topology, a standby or
            several servers.

    References:
        Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM ToN
        6(1), 1998; the weights as in Schindelhauer and Schomaker, "Weighted distributed hash
        tables", SPAA 2005.
    """

    seed: int = 0
    block_share: float = 0.125
    max_ratio: float = 64.0

    def __post_init__(self) -> None:
        check_ranges(self, block_share="in (0, 1]", max_ratio="at least 1")
        require_fixed_roles(self)

    @property
    def traits(self) -> Traits:
        """Traits of the inner algorithm, with `is_balanced` and `claims_units` set."""
        return replace(self.inner.traits, is_balanced=True, claims_units=True)

    @property
    def num_workers(self) -> int:
        return num_workers_in(self)

    def init(self, rank: Rank, params: Tensor) -> ClaimedState:
        return ClaimedState(rank=rank, params=params, inner=self.inner.init(rank, params))

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """The inner algorithm's messages, and the workers' reports."""
        bits = TensorSpec(torch.uint8, (None,), MOST_UNITS // 8)
        pairs = TensorSpec(torch.int64, (2, None), 2 * _MOST_GIFTS, 0, MOST_UNITS)
        positive = (0, math.inf)
        numbers = dict.fromkeys(("throughput", "own_weight", "next_weight"), positive)
        report = MessageSpec(
            {"done": bits},
            {"given": pairs, "merged": bits},
            {**numbers, "since": range(2**31)},
            {"asks": range(1, 2), "first": range(2**31)},
            max_round=self.traits.num_rounds,
        )
        return {**self.inner.schema(params), "claims": report}

    def handle(self, state: ClaimedState, event: Event, now: Seconds) -> list[Effect]:
        """Handle `event`, as in `Algorithm`.

        Raises:
            LocalProtocolError: If an epoch has too many units.
        """
        match event:
            case Started():
                if event.num_units > MOST_UNITS:
                    raise LocalProtocolError(
                        f"an epoch has {event.num_units} units, more than {MOST_UNITS}; make "
                        "them larger, as in Shared(units=1024)"
                    )
                state.num_units, state.has_rejoined = event.num_units, event.has_rejoined
                state.unit_cost = event.epoch_cost / max(1, event.num_units)
            case Predicted() if state.is_predicting:
                return self._use_forecast(state, event, now)
            case Trained() if state.held is not None:
                return self._account(state, event, now)
            case Received(message=Message(kind="claims")):
                return self._hear(state, event, now)
            case TimerFired("claims"):
                return self._time_out(state, now)
            case WorkerLost():
                self._lose(state, event)
                state.is_waiting = False  # the others now have more to do
                return [*self._pass_on(state, event, now), *self._go_on(state, now)]
            case WorkerJoined():
                effects = self._welcome(state, event)
                return [*effects, *self._pass_on(state, event, now), *self._go_on(state, now)]
        return self._pass_on(state, event, now)

    # Between the inner algorithm and the driver.

    def _pass_on(self, state: ClaimedState, event: Event, now: Seconds) -> list[Effect]:
        """Let the inner algorithm handle `event`, and hold back its training requests."""
        effects = self.inner.handle(state.inner, event, now)
        state.params, state.round = state.inner.params, state.inner.round
        if not state.num_units:
            return effects
        carried: list[Effect] = []
        for effect in effects:
            match effect:
                case Train():
                    state.progress = Pieces(train=effect, start=now, params=effect.params)
                    state.is_predicting = True
                    carried.append(Predict())
                case Finish():
                    # The others must not wait for what it still owns.
                    state.rates[state.rank] = 0.0
                    ledger = state.ledger(state.epoch)
                    carried += [*self._tell_all(state, ledger), effect]
                case _:
                    carried.append(effect)
        return carried

    def _tell_all(self, state: ClaimedState, ledger: Ledger, **how: bool) -> list[Effect]:
        message = state.report(ledger, **how)
        return [Send(j, message) for j in self._others(state)]

    def _others(self, state: ClaimedState) -> list[Rank]:
        return [j for j in self._ranks if j != state.rank and j not in state.lost]

    @property
    def _ranks(self) -> list[Rank]:
        return [j for j in range(self.num_workers) if self.role(j).has_data]

    # Training.

    def _use_forecast(
        self, state: ClaimedState, event: Predicted, now: Seconds
    ) -> list[Effect]:
        state.is_predicting = False
        state.rates[state.rank] = max(event.throughput, 1e-9)
        assert state.progress is not None
        if isinstance(state.progress.train.work, Epochs):
            state.epoch = state.inner.round  # a worker that has caught up skips epochs
        state.announce_weight(state.rates[state.rank])
        effects: list[Effect] = []
        if state.is_new:
            # Once, everybody waits: without all weights, workers would not agree.
            effects = self._tell_all(state, state.ledger(state.epoch))
            patience = 0.05 * state.num_units * state.unit_cost / state.rates[state.rank]
            effects.append(SetTimer("claims", now + patience))
        return [*effects, *self._go_on(state, now)]

    def _has_heard_all(self, state: ClaimedState) -> bool:
        return all(j in state.weights for j in self._others(state))

    def _go_on(self, state: ClaimedState, now: Seconds) -> list[Effect]:
        """Begin the next units if there are any, answer the inner algorithm, or wait."""
        if state.progress is None or state.is_busy or not state.num_units:
            return []
        if state.is_new and not self._has_heard_all(state):
            return []
        if state.is_new:
            self._enter(state)
        effects: list[Effect] = []
        work = state.progress.train.work
        if isinstance(work, Steps) and not self._num_units(state, work):
            return self._answer(state, now)
        while True:
            ledger, units, told = self._claim(state, now)
            effects += told
            if units:
                state.held = (ledger.epoch, units)
                state.is_waiting, state.asked_at = False, None
                train = state.progress.piece(Units(ledger.epoch, units))
                return [*effects, SetTimer("claims", math.inf), train]
            if isinstance(work, Epochs):
                if not state.pending:
                    return [*effects, *self._end_epoch(state), *self._answer(state, now)]
                break
            if self._is_last(state):
                if not state.pending:  # there are fewer units than the run has work for
                    return [*effects, *self._answer(state, now)]
                break
            if not self._may_begin_next(state):
                break
            effects += self._end_epoch(state)
            state.epoch += 1
        if not state.is_waiting:  # news do not make it wait longer, or liars could
            state.is_waiting = True
            effects.append(SetTimer("claims", now + self._patience(state, now)))
        return effects

    def _enter(self, state: ClaimedState) -> None:
        state.is_new = False
        assert state.progress is not None
        if state.epochs and state.has_rejoined and isinstance(state.progress.train.work, Steps):
            # The median, so that no liar sends it far ahead.
            state.epoch = statistics.median_high(state.epochs.values())
            state.forget_unknown()
            state.lost = dict.fromkeys(state.lost, state.epoch)

    def _open(self, state: ClaimedState, now: Seconds) -> list[Ledger]:
        """The ledgers that this worker works on, oldest first."""
        for epoch in sorted(state.ledgers):
            is_settled = not state.ledgers[epoch].undone().any()
            if epoch >= state.epoch - 1 - PATIENCE * (not is_settled):
                break
            del state.ledgers[epoch]
            state.first = epoch + 1
        self._give_up(state)
        # A newcomer, too, cares for the units of earlier epochs that others have not done.
        for epoch in sorted({*state.ledgers, state.epoch}):
            if epoch <= state.epoch:
                state.open(epoch, self.seed, self.max_ratio, now)
        return [
            state.ledgers[epoch]
            for epoch in sorted(state.ledgers)
            if epoch <= state.epoch and state.ledgers[epoch].base is not None
        ]

    def _give_up(self, state: ClaimedState) -> None:
        """Claim the units of those that have been out of reach for long, as of the lost.

        One that is only cut off does its own units, and the two sides so repeat nothing. At the
        end of the run there is no later epoch in which to do what it has not done.
        """
        is_last = self._is_last(state)
        lost = [
            j
            for j, since in state.lost.items()
            if is_last or state.epoch - since > PATIENCE
            if j not in state.given_up
        ]
        for j in lost:
            self._give_up_one(state, j)
        overdue = [
            ledger
            for ledger in state.ledgers.values()
            if is_last or state.epoch - ledger.epoch > PATIENCE
            if ledger.awaited or state.awaited
        ]
        for ledger in overdue:
            silent = {**ledger.awaited, **dict.fromkeys(sorted(state.awaited))}
            ledger.gone.update(silent)
            ledger.late.update(silent)
            ledger.awaited.clear()
        if lost or overdue:
            self._divide_again(state)

    def _give_up_one(self, state: ClaimedState, rank: Rank) -> None:
        state.given_up[rank] = None
        for ledger in state.ledgers.values():
            ledger.forget_gifts(rank)

    def _is_last(self, state: ClaimedState) -> bool:
        return state.epoch + 1 >= (self.traits.num_rounds or math.inf)

    def _claim(
        self, state: ClaimedState, now: Seconds
    ) -> tuple[Ledger, tuple[int, ...], list[Effect]]:
        """Find the next units to train on; give away what others will finish sooner."""
        assert state.progress is not None
        effects: list[Effect] = []
        for ledger in self._open(state, now):
            if self._give(state, ledger, now):
                effects += self._tell_all(state, ledger)
            if own := state.own(ledger):
                return ledger, tuple(own[: self._num_wanted(state, len(own))]), effects
        return ledger, (), effects

    def _num_wanted(self, state: ClaimedState, num_left: int) -> int:
        """Number of units before the next report."""
        assert state.progress is not None
        work = state.progress.train.work
        if not isinstance(work, Steps):
            return max(1, round(self.block_share * num_left))
        return self._num_units(state, work)

    def _num_units(self, state: ClaimedState, work: Steps) -> int:
        """Number of units that take as long as these steps."""
        fastest = max(rate for j, rate in state.rates.items() if j not in state.lost)
        ratio = state.rates[state.rank] / fastest if self.traits.is_synchronous else 1.0
        return work.scaled(ratio / (state.unit_steps or math.inf))

    def _give(self, state: ClaimedState, ledger: Ledger, now: Seconds) -> bool:
        """Give units away; return whether there were any."""
        remaining = state.remaining(ledger, now)
        if remaining.get(state.rank, 0) < 1 or len(remaining) < 2:
            return False
        rates = state.limited_rates(remaining, self.max_ratio)
        takers = receivers(state.rank, remaining, rates)
        # From the end, because it works from the beginning. Nobody gets back what it has given.
        gifts = {
            u: j
            for u, j in zip(reversed(state.own(ledger)), takers, strict=False)
            if u not in ledger.given.get(j, {})
        }
        pairs = {**ledger.given.get(state.rank, {}), **gifts}
        if len(pairs) > _MOST_GIFTS:
            return False  # it will be late, and the others take over what is overdue
        ledger.given[state.rank] = pairs
        return bool(gifts)

    def _account(self, state: ClaimedState, event: Trained, now: Seconds) -> list[Effect]:
        assert state.held is not None
        assert state.progress is not None
        (epoch, units), state.held = state.held, None
        if event.has_gone_back:  # nothing was trained
            state.progress = None
            return self._pass_on(state, event, now)
        ledger = state.ledger(epoch)
        done = ledger.done.clone()
        done[list(units)] = True
        ledger.done = done
        others = [report for j, report in ledger.reports.items() if j > state.rank]
        if others:
            state.num_twice += int(torch.stack(others).any(0)[list(units)].sum())
        state.unit_steps = event.num_steps / len(units)
        state.progress.add(event)
        # At once, so that nobody does it again even if this worker crashes now.
        told = self._tell_all(state, ledger)
        if isinstance(state.progress.train.work, Steps):
            return [*told, *self._answer(state, now)]
        state.is_predicting = True
        return [*told, Predict()]

    def _answer(self, state: ClaimedState, now: Seconds) -> list[Effect]:
        """Answer the inner algorithm's request."""
        assert state.progress is not None
        progress, state.progress = state.progress, None
        state.is_waiting, state.asked_at = False, None
        result = progress.total(now, progress.params)  # skipped if the others were faster
        return [SetTimer("claims", math.inf), *self._pass_on(state, result, now)]

    # The end of an epoch.

    def _may_begin_next(self, state: ClaimedState) -> bool:
        """Whether a worker that trains by steps, and owns nothing, begins the next epoch."""
        if not state.pending:
            return True
        if not state.weight.at(state.epoch):
            # It does not know what the lost own, and so what the others have to do: it follows
            # those, of which no liar sends it far ahead.
            absent = {*state.away, *state.lost}
            epochs = [epoch for j, epoch in state.epochs.items() if j not in absent]
            if epochs and statistics.median_low(epochs) > state.epoch:
                return True
        is_part = state.weight.at(state.epoch + 1) > 0
        return is_part and len(state.pending) < 2

    def _end_epoch(self, state: ClaimedState) -> list[Effect]:
        notes: list[Effect] = []
        for ledger in state.ledgers.values():
            num_missing = int(ledger.undone().sum())
            is_due = not num_missing or state.epoch - ledger.epoch > PATIENCE
            if ledger.base is None or ledger.is_noted or not is_due:
                continue
            ledger.is_noted = True
            numbers = {
                "epoch": float(ledger.epoch),
                "units": float(state.num_units),
                "done": float(ledger.done.sum()),
                "given": float(len(ledger.given.get(state.rank, {}))),
                "twice": float(state.num_twice),
                "missing": float(num_missing),
            }
            state.num_twice = 0
            notes.append(Note("units", numbers))
        return notes

    def _patience(self, state: ClaimedState, now: Seconds) -> Seconds:
        """Seconds until what the others owe is overdue."""
        absent = {*state.away, *state.lost}
        present = [j for j in state.rates if j not in absent and state.rates[j] > 0]
        rates = state.limited_rates(present, self.max_ratio)
        whole = state.num_units * state.unit_cost / sum(rates.values())
        pending, owed = state.pending, dict.fromkeys(rates, 0.0)
        for ledger in pending:
            for j, left in state.remaining(ledger, now).items():
                owed[j] += left * state.unit_cost / rates[j]
        longest = max((owed[j] for j in owed if j != state.rank), default=0.0)
        # Nobody waits longer for one that says that it is slow than for the slowest allowed.
        slowest = max(rates.values()) / self.max_ratio
        most = len(pending) * whole + state.unit_cost / slowest
        return 1.5 * min(longest, most) + 0.1 * whole

    def _time_out(self, state: ClaimedState, now: Seconds) -> list[Effect]:
        if state.progress is None or state.is_busy:
            return []
        if state.is_new:
            self._enter(state)  # without those that it has not heard of
            return self._go_on(state, now)
        if state.asked_at is None:
            state.asked_at = now
            told = [
                effect
                for ledger in state.pending
                for effect in self._tell_all(state, ledger, asks=True)
            ]
            return [*told, SetTimer("claims", now + self._patience(state, now))]
        # What is overdue is claimed again, as if its owners were lost. Those that are silent
        # may be cut off before anybody has noticed, and do their units.
        asked_at, state.asked_at, state.is_waiting = state.asked_at, None, False
        for ledger in state.pending:
            owners = ledger.owners(state.away)
            undone = ledger.pending(state.awaited, state.away)
            for j in {*owners[undone].tolist()} - {state.rank}:
                ledger.awaited[j] = None
                if state.heard_at.get(j, -math.inf) >= asked_at or self._is_last(state):
                    ledger.gone[j] = ledger.late[j] = None
                    del ledger.awaited[j]
            state.divide_again(ledger, self.seed)
        return self._go_on(state, now)

    # The others.

    def _hear(self, state: ClaimedState, event: Received, now: Seconds) -> list[Effect]:
        if not state.num_units or event.sender not in self._ranks:
            return []
        had_finished = event.sender in state.away
        state.hear(event.sender, event.message, self._ranks, now)
        if had_finished != (event.sender in state.away):
            self._divide_again(state)
        if state.progress is not None and isinstance(state.progress.train.work, Epochs):
            state.catch_up(event.sender, state.first_undone_of(event.message))
        effects = self._find(state, event)
        if "asks" in event.message.numbers:
            answer = state.report(state.ledger(event.message.round), with_others=True)
            effects.append(Send(event.sender, answer))
        return [*effects, *self._go_on(state, now)]

    def _find(self, state: ClaimedState, event: Received) -> list[Effect]:
        """Count on a worker that was silent, and ask what it has done in the meantime."""
        found = [each for each in state.ledgers.values() if event.sender in each.awaited]
        for ledger in found:
            del ledger.awaited[event.sender]
        return [
            Send(event.sender, state.report(ledger, asks=True))
            for ledger in found
            if ledger.epoch != event.message.round
        ]

    def _divide_again(self, state: ClaimedState) -> None:
        for ledger in state.ledgers.values():
            if ledger.base is not None:
                state.divide_again(ledger, self.seed)

    def _lose(self, state: ClaimedState, event: WorkerLost) -> None:
        state.lost.setdefault(event.rank, state.epoch)
        if event.has_lied:
            self._give_up_one(state, event.rank)
            for ledger in state.ledgers.values():
                ledger.reports.pop(event.rank, None)
        self._divide_again(state)

    def _welcome(self, state: ClaimedState, event: WorkerJoined) -> list[Effect]:
        state.lost.pop(event.rank, None)
        state.given_up.pop(event.rank, None)
        for ledger in state.ledgers.values():
            ledger.awaited.pop(event.rank, None)
            ledger.parted[event.rank] = None
        if event.has_restarted:
            # It knows nothing of the units that it owned, and takes part by agreement again
            # when it has said so.
            state.weights[event.rank] = Weight()
            state.rates.pop(event.rank, None)
            for ledger in state.ledgers.values():
                ledger.gone[event.rank] = None
                ledger.parted.pop(event.rank)
                ledger.forget_gifts(event.rank)
        self._divide_again(state)
        if event.rank not in self._ranks or not state.num_units:
            return []
        reports = (state.report(each, with_others=True) for each in state.ledgers.values())
        return [Send(event.rank, report) for report in reports]
