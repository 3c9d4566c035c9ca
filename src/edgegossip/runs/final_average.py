"""A final exchange after any algorithm, so that all workers in reach end with the mean of the
evaluated models.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm, Wrapper
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec, TensorSpec

_FINAL = "final average"
"""Kind of the message with a final model, and name of the timer at `ends_at`."""
_MEMBERS = "final members"
"""Kind of the message that names the models in a mean, or asks for missing ones."""
_ASK = "final ask"
"""Name of the timer after which a worker asks for missing models."""
_ASK_AFTER: Seconds = 10.0
"""Seconds until the first question; they double with each one."""
_LONGEST: Seconds = 60.0
"""Wait for workers in reach, however short the run was."""
_PATIENCE = 10.0
"""Maximum wait for workers in reach, as a multiple of the run so far."""


@dataclass(slots=True, kw_only=True)
class FinalState(WorkerState):
    """State of one worker.

    Attributes:
        inner: State of the inner algorithm.
        num_params: Number of entries of a whole model.
        is_ending: Whether the inner algorithm has finished or its time is over.
        is_cut: Whether its time was over before it had finished.
        is_idle: Whether the inner algorithm has no work, but may get some before others end.
        models: The final models by rank, including this worker's; empty tensors for models
            that do not count.
        lost: Unreachable workers, and the times at which they were lost.
        means: By rank, the checksums of the models in that worker's mean, by their ranks.
        renewable: Workers that came back with another process, which may have another model.
        answered: Workers whose question was answered, and the times until which they get no
            other answer.
        ended_at: Time at which this worker sent its model.
        ended_in: Round in which it did.
        average: Mean of the evaluated models, once all have arrived.
        is_stale: Whether a model has arrived or has been dropped since.
        asks_after: Seconds until this worker asks again for missing models.
        waits_until: Time until which it waits for the models of workers in reach.
        num_exchanged: Rounds in which a message of another worker arrived.
        has_heard: Whether one has arrived in this round.
        has_lost: Whether a worker was lost before the end.
    """

    inner: Any
    num_params: int
    is_ending: bool = False
    is_cut: bool = False
    is_idle: bool = False
    models: dict[Rank, Tensor] = field(default_factory=dict)
    lost: dict[Rank, Seconds] = field(default_factory=dict)
    means: dict[Rank, dict[Rank, int]] = field(default_factory=dict)
    renewable: dict[Rank, None] = field(default_factory=dict)
    answered: dict[Rank, Seconds] = field(default_factory=dict)
    ended_at: Seconds = math.inf
    ended_in: int = 0
    average: Tensor | None = None
    is_stale: bool = True
    asks_after: Seconds = _ASK_AFTER
    waits_until: Seconds = math.inf
    num_exchanged: int = 0
    has_heard: bool = False
    has_lost: bool = False

    @property
    def estimate(self) -> Tensor:
        """The average or, before there is one, the inner algorithm's estimate."""
        inner: Tensor = self.inner.estimate
        return inner if self.average is None else self.average

    @property
    def is_evaluated(self) -> bool:
        """Whether the estimate is evaluated: always for the average, otherwise as the inner
        algorithm decides.
        """
        return self.average is not None or bool(self.inner.is_evaluated)


@dataclass(frozen=True, kw_only=True)
class FinalAverage(Wrapper[FinalState]):
    """Run an algorithm to its end, then average the workers' models.

    Each worker whose role is evaluated (see `Role`) sends its estimate to all others, with no
    entries if its state is not evaluated, as that of a server on standby. A worker waits for
    the models of all workers in reach, however long they train. Only the transport ends the
    wait, or a minute more than ten times the run's duration, or than twice `ends_at`. A worker
    asks again for models that do not arrive. A model that arrives later is still averaged, but
    each process has only one.

    Workers that receive the same models end with the same parameters, bit for bit: the mean, or
    the server's parameters in a run with a server. Each tells all others the checksums of the
    models in its mean, so that `agreement_of` can say which workers end with another one.

    Args:
        inner: The algorithm to run.
        num_workers: Number of workers in the run.
        ends_at: Latest time at which the inner algorithm ends.
    """

    num_workers: int
    ends_at: Seconds = math.inf

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        # Where servers share the model, theirs are slices of it.
        longest = -(-params.numel() // self._num_slices)
        piece = TensorSpec(params.dtype, (None,), max_numel=longest)
        sums = TensorSpec(torch.int64, (self.num_workers,), minimum=0, maximum=2**32)
        return {
            **self.inner.schema(params),
            _FINAL: MessageSpec({"params": piece}, numbers={"cut": range(2)}),
            _MEMBERS: MessageSpec({"members": sums}, numbers={"asks": range(2)}),
        }

    def init(self, rank: Rank, params: Tensor) -> FinalState:
        inner = self.inner.init(rank, params)
        num_params = params.numel()
        return FinalState(rank=rank, params=inner.params, inner=inner, num_params=num_params)

    def replaces(self, newer: Message, older: Message) -> bool:
        """Whether the inner algorithm says so, or `newer` is the final model of a worker whose
        time was over.

        The others' time is over, too, so no final model can change by what they get now. On a
        slow link, it would only hold up the final models.
        """
        if newer.kind != _FINAL:
            return self.inner.replaces(newer, older)
        is_needed = older.kind == _MEMBERS or self.inner.counts_after_end(older)
        return bool(newer.numbers["cut"]) and not is_needed

    def renew(self, state: FinalState, params: Tensor) -> FinalState:
        """Let a worker that had ended keep its final model, which others have."""
        renewed = self.init(state.rank, params)
        if state.rank in state.models:
            renewed.models[state.rank] = state.models[state.rank]
            renewed.is_ending, renewed.ended_in = True, state.ended_in
        return renewed

    def handle(self, state: FinalState, event: Event, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Received(sender, Message(kind=kind) as message) if kind == _FINAL:
                self._take(state, sender, message.payload["params"])
            case Received(sender, Message(kind=kind) as message) if kind == _MEMBERS:
                effects = self._compare(state, sender, message, now)
            case TimerFired(name) if name == _FINAL:
                state.is_cut = not state.is_ending
                state.is_ending = True
            case TimerFired(name) if name == _ASK:
                effects = self._ask(state, now)
            case Trained() if state.is_ending:
                pass  # too late to count
            case _:
                effects = self._pass_on(state, event, now)
        # Heard even before the end, because the exchange must know then who is in reach.
        match event:
            case Started() if self.ends_at < math.inf:
                effects.append(SetTimer(_FINAL, self.ends_at))
            case WorkerLost(rank, has_lied):
                state.lost.setdefault(rank, now)
                state.has_lost |= not state.is_ending
                if has_lied and state.models.pop(rank, None) is not None:
                    # Its model may be as false as its messages: average again without it.
                    state.is_stale = True
            case WorkerJoined(rank, has_restarted):
                state.lost.pop(rank, None)
                if has_restarted:
                    state.renewable[rank] = None
                if state.rank in state.models:
                    # Nothing was sent while it was away, and it may wait for this.
                    effects += self._send(state, [rank])
                    effects += self._tell(state, [rank])
        if state.is_idle:
            # Once another's model is final, or all are lost, nobody has work for this worker.
            is_alone = {*self._awaited(state)} <= {state.rank}
            state.is_ending |= bool(state.models) or is_alone
        state.params, state.round = state.inner.params, state.inner.round
        return [*effects, *self._end(state, now)] if state.is_ending else effects

    @property
    def _num_slices(self) -> int:
        return max(self.role(rank).num_slices for rank in range(self.num_workers))

    @property
    def counted(self) -> list[Rank]:
        """The ranks whose models may count in the mean."""
        return [rank for rank in range(self.num_workers) if self.role(rank).is_evaluated]

    def members(self, state: FinalState) -> list[Rank]:
        """The workers whose models count and have arrived."""
        return [r for r in self.counted if r in state.models and len(state.models[r])]

    def _pass_on(self, state: FinalState, event: Event, now: Seconds) -> list[Effect]:
        """Let the inner algorithm handle the event, but do not finish yet."""
        state.has_heard |= isinstance(event, Received)
        effects = self.inner.handle(state.inner, event, now)
        if state.inner.round != state.round:
            state.num_exchanged += state.has_heard
            state.has_heard = False
        # The host would leave at `Finish`, before the exchange; training that is requested
        # together with it would not count.
        for effect in effects:
            match effect:
                case Finish(may_resume):
                    state.is_idle |= may_resume
                    state.is_ending |= not may_resume
                case Train():
                    state.is_idle = False
        dropped = Train | Finish if state.is_ending else Finish
        return [effect for effect in effects if not isinstance(effect, dropped)]

    def _end(self, state: FinalState, now: Seconds) -> list[Effect]:
        """Send this worker's model once, and average whenever no model is awaited."""
        effects: list[Effect] = []
        if state.ended_at == math.inf:
            if state.rank not in state.models:
                # A copy: the inner state may still change, and this model is sent as it is now.
                estimate = state.inner.estimate.clone()
                final = estimate if state.inner.is_evaluated else estimate[:0]
                state.models[state.rank], state.ended_in = final, state.round
            state.ended_at = now
            state.waits_until = min(now + _PATIENCE * now, 2 * self.ends_at) + _LONGEST
            effects += self._send(state, range(self.num_workers))
            # The timer also tells a host that this worker waits for living workers, and not
            # for messages that may have been lost; the one at the time limit would not.
            effects += [SetTimer(_FINAL, math.inf)] if now < self.ends_at < math.inf else []
            effects.append(SetTimer(_ASK, now + state.asks_after))
        if self._awaited(state) and now < state.waits_until:
            return effects
        if state.is_stale:
            # A model that arrives after the wait still changes the mean, but not the end.
            is_first, state.is_stale = state.average is None, False
            members = self.members(state)
            state.means[state.rank] = {rank: _checksum(state.models[rank]) for rank in members}
            state.average = self._average(state, members)
            effects += self._tell(state, range(self.num_workers))
            effects += [Finish()] if is_first else []
        return effects

    def _take(self, state: FinalState, sender: Rank, params: Tensor) -> None:
        if len(params) not in (0, self.role(sender).num_held(state.num_params)):
            return
        # One model per process: an answer to a question repeats it, and a liar that sends
        # another one changes no mean. A worker that came back may have trained on.
        if sender not in state.models or sender in state.renewable:
            state.models[sender], state.is_stale = params, True
            state.renewable.pop(sender, None)

    def _awaited(self, state: FinalState) -> list[Rank]:
        return [r for r in self.counted if r not in state.models and r not in state.lost]

    def _ask(self, state: FinalState, now: Seconds) -> list[Effect]:
        """Ask for models that may have been lost on the way, more and more rarely."""
        if state.average is not None:
            return []
        state.asks_after *= 2
        again = SetTimer(_ASK, min(now + state.asks_after, max(now, state.waits_until)))
        arrived = dict.fromkeys(state.models, 1)  # what matters is only which ones have
        return [*self._name(state, arrived, self._awaited(state), asks=True), again]

    def _tell(self, state: FinalState, ranks: Iterable[Rank]) -> list[Effect]:
        """Tell some workers in reach which models are in the mean, if there is one."""
        if state.average is None:
            return []
        return self._name(state, state.means[state.rank], ranks, asks=False)

    def _name(
        self,
        state: FinalState,
        models: Mapping[Rank, int],
        ranks: Iterable[Rank],
        *,
        asks: bool,
    ) -> list[Effect]:
        sums = torch.tensor([models.get(rank, 0) for rank in range(self.num_workers)])
        message = Message(_MEMBERS, state.round, {"members": sums}, {"asks": int(asks)})
        return [Send(r, message) for r in ranks if r != state.rank and r not in state.lost]

    def _compare(
        self, state: FinalState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        """Note which models another worker has averaged, or repeat one that it lacks."""
        sums = enumerate(message.payload["members"].tolist())
        theirs = {rank: checksum for rank, checksum in sums if checksum}
        if not message.numbers["asks"]:
            state.means[sender] = theirs
            return []
        # The model may still be on its way over a slow link, or the sender may lie, so answers
        # become rarer.
        soonest = state.answered.get(sender, state.ended_at + _ASK_AFTER / 2)
        if state.rank not in state.models or state.rank in theirs or now < soonest:
            return []
        state.answered[sender] = now + max(_ASK_AFTER, now - state.ended_at)
        return self._send(state, [sender])

    def _average(self, state: FinalState, members: list[Rank]) -> Tensor:
        """Average the arrived models; if servers share the model, join their slices."""
        slices: dict[int, list[Tensor]] = {}
        for rank in members:
            found = slices.setdefault(self.role(rank).slice_index, [])
            found.append(state.models[rank])
        if len(slices) == self._num_slices:
            means = [torch.stack(slices[i]).mean(0) for i in sorted(slices)]
            return means[0] if len(means) == 1 else torch.cat(means)
        own: Tensor = state.inner.estimate
        if len(own) < state.num_params:
            raise ServerLostError(
                f"server {state.rank} has a slice of the model, and cannot reach the "
                "servers of the others; start them again, and repeat the run"
            )
        return own

    def _send(self, state: FinalState, ranks: Iterable[Rank]) -> list[Effect]:
        if not self.role(state.rank).is_evaluated:
            return []
        # Always the same message, so that one that still waits is not sent twice.
        cut = {"cut": int(state.is_cut)}
        final = Message(_FINAL, state.ended_in, {"params": state.models[state.rank]}, cut)
        return [Send(r, final) for r in ranks if r != state.rank and r not in state.lost]


def have_one_model(roles: Iterable[Role]) -> bool:
    """Whether all ranks with these roles that are evaluated hold the same whole model."""
    parts = {(role.name, role.num_slices) for role in roles if role.is_evaluated}
    return len(parts) == 1 and next(iter(parts))[1] == 1


def with_final_average(
    algorithm: Algorithm[Any], num_workers: int, ends_at: Seconds, params: Tensor
) -> Algorithm[Any]:
    """Wrap `algorithm` if its workers exchange whole models; others are returned unchanged.

    Stages, and servers that share a model, end with the parts that they hold, and workers that
    send nothing end with their own models.
    """
    roles = [algorithm.role(rank) for rank in range(num_workers)]
    if not have_one_model(roles) or not algorithm.schema(params):
        return algorithm
    return FinalAverage(inner=algorithm, num_workers=num_workers, ends_at=ends_at)


def _checksum(model: Tensor) -> int:
    """A number above 0 that tells models apart."""
    return zlib.crc32(model.contiguous().view(torch.uint8).numpy().data) + 1


def ending_seconds(ends_at: Seconds) -> Seconds:
    """Seconds after `ends_at` within which each worker has finished, and may have left."""
    return ends_at + 2 * _LONGEST
