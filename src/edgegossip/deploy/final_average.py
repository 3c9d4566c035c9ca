"""A final exchange after any algorithm, so that all workers end with the mean of the
evaluated models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edgegossip.core.algorithm import Traits, Wrapper
from edgegossip.core.errors import ServerLostError
from edgegossip.core.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Rank,
    Received,
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
from edgegossip.core.schema import MessageSpec, TensorSpec

_FINAL = "final average"


@dataclass(slots=True, kw_only=True)
class FinalState(WorkerState):
    """State of one worker.

    Attributes:
        inner: State of the inner algorithm.
        is_ending: Whether the inner algorithm has finished or its time is over.
        models: The final models by rank, including this worker's.
        lost: Unreachable workers, as keys.
        average: Mean of the evaluated models, once all have arrived.
        num_params: Number of entries of a whole model.
    """

    inner: Any
    num_params: int
    is_ending: bool = False
    models: dict[Rank, Tensor] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)
    average: Tensor | None = None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _LimitedTraits(Traits):
    ends_at: Seconds

    def progress(self, round: int, now: Seconds, max_seconds: Seconds = math.inf) -> float:
        return Traits.progress(self, round, now, min(max_seconds, self.ends_at))


@dataclass(frozen=True, kw_only=True)
class FinalAverage(Wrapper[FinalState]):
    """Run an algorithm to its end, then average the workers' models.

    Each worker whose role is evaluated (see `Role`) sends its estimate to all others. All
    workers wait for these models, except for those of lost workers. All workers still present
    end with the same parameters, bit for bit: the mean, or the server's parameters in a run
    with a server. A worker that no message reaches keeps its own parameters.

    Args:
        inner: The algorithm to run.
        num_workers: Number of workers in the run.
        ends_at: Latest time at which the inner algorithm ends.
    """

    num_workers: int
    ends_at: Seconds = math.inf

    @property
    def traits(self) -> Traits:
        return _LimitedTraits(**_fields(self.inner.traits), ends_at=self.ends_at)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        # Where servers share the model, theirs are slices of it.
        num_slices = max(self.role(rank).num_slices for rank in range(self.num_workers))
        longest = -(-params.numel() // num_slices)
        piece = TensorSpec(params.dtype, (None,), max_numel=longest)
        final = MessageSpec({"params": params if num_slices == 1 else piece})
        return {**self.inner.schema(params), _FINAL: final}

    def init(self, rank: Rank, params: Tensor) -> FinalState:
        inner = self.inner.init(rank, params)
        num_params = params.numel()
        return FinalState(rank=rank, params=inner.params, inner=inner, num_params=num_params)

    def handle(self, state: FinalState, event: Event, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Received(sender, Message(kind=kind) as message) if kind == _FINAL:
                role, params = self.role(sender), message.payload["params"]
                if role.num_slices == 1 or len(params) == role.num_held(state.num_params):
                    state.models[sender] = params
            case TimerFired(name) if name == _FINAL:
                state.is_ending = True
            case Trained() if state.is_ending:
                pass  # too late to count
            case _:
                effects = self._pass_on(state, event, now)
        match event:
            case Started() if self.ends_at < math.inf:
                effects.append(SetTimer(_FINAL, self.ends_at))
            case WorkerLost(rank, has_lied):
                state.lost[rank] = None
                if has_lied:
                    state.models.pop(rank, None)
            case WorkerJoined(rank):
                state.lost.pop(rank, None)
                effects += self._send(state, [rank]) if state.rank in state.models else []
        state.params, state.round = state.inner.params, state.inner.round
        return [*effects, *self._end(state)] if state.is_ending else effects

    def _pass_on(self, state: FinalState, event: Event, now: Seconds) -> list[Effect]:
        """Let the inner algorithm handle the event, but do not finish yet."""
        effects = self.inner.handle(state.inner, event, now)
        state.is_ending |= any(isinstance(effect, Finish) for effect in effects)
        dropped = Train | Finish if state.is_ending else Finish
        return [effect for effect in effects if not isinstance(effect, dropped)]

    def _end(self, state: FinalState) -> list[Effect]:
        """Send this worker's model once, and average once all models have arrived."""
        effects: list[Effect] = []
        if state.rank not in state.models:
            state.models[state.rank] = state.inner.estimate.clone()
            effects += self._send(state, range(self.num_workers))
        counted = [r for r in range(self.num_workers) if self.role(r).is_evaluated]
        if state.average is None and all(r in state.models or r in state.lost for r in counted):
            state.average = self._average(state, counted)
            effects.append(Finish())
        return effects

    def _average(self, state: FinalState, counted: list[Rank]) -> Tensor:
        """Average the arrived models; if servers share the model, join their slices."""
        slices: dict[int, list[Tensor]] = {}
        for rank in counted:
            if rank in state.models:
                found = slices.setdefault(self.role(rank).slice_index, [])
                found.append(state.models[rank])
        if len(slices) == max((self.role(rank).num_slices for rank in counted), default=1):
            means = [torch.stack(slices[i]).mean(0) for i in sorted(slices)]
            return means[0] if len(means) == 1 else torch.cat(means)
        own = state.models[state.rank]
        if len(own) < state.num_params:
            raise ServerLostError(
                f"server {state.rank} has a slice of the model, and cannot reach the "
                "servers of the others; start them again, and repeat the run"
            )
        return own

    def _send(self, state: FinalState, ranks: Iterable[Rank]) -> list[Effect]:
        if not self.role(state.rank).is_evaluated:
            return []
        final = Message(_FINAL, state.round, {"params": state.models[state.rank]})
        return [Send(r, final) for r in ranks if r != state.rank and r not in state.lost]


def _fields(traits: Traits) -> dict[str, Any]:
    """The fields of `traits`, unchanged."""
    return {name: getattr(traits, name) for name in Traits.__dataclass_fields__}
