"""An algorithm that uses every word of the contract, and keeps all that it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import (
    Assign,
    Assigned,
    Effect,
    Epochs,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
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
    TimerFired,
    Train,
    Trained,
    WorkerState,
)
from edgegossip.contract.schema import MessageSpec, TensorSpec


def _train(params: Tensor, number: int) -> Train:
    """Work of each kind in turn."""
    match number % 4:
        case 0:
            return Train(params, Steps(3))
        case 1:
            return Train(params, Epochs(), keep_ratio=0.5)
        case 2:
            return Train(params, Epochs(share=0.5), keep_ratio=0.7)
    return Train(params, Epochs(share=0.5), keep_ratio=0.7, begins_pass=False)


@dataclass(slots=True, kw_only=True)
class Keeper(WorkerState):
    """Keeps every event that it was told, and every effect that it has answered with."""

    kept: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class EveryWord(Algorithm[Keeper]):
    """Works for some rounds, and tunes itself: it goes on only from what validates better.

    Args:
        num_workers: Of the run; each sends to the next one.
        num_rounds: Pieces of work.
    """

    num_workers: int = 4
    num_rounds: int = 6

    def init(self, rank: Rank, params: Tensor) -> Keeper:
        return Keeper(rank=rank, params=params)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        return {"params": MessageSpec({"params": TensorSpec.like(params)})}

    def handle(self, state: Keeper, event: Event, now: Seconds) -> list[Effect]:
        effects = self._answer(state, event, now)
        state.kept += [event, *effects]
        return effects

    def _answer(self, state: Keeper, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                following = (state.rank + 1) % self.num_workers
                return [Assign(tuple(sorted({state.rank, following})))]
            case Assigned():
                return [Predict(), Evaluate(state.params)]
            case Predicted():
                return [SetTimer("train", now + 0.005)]
            case TimerFired("train"):
                # Perhaps while an evaluation is under way.
                return [_train(state.params, state.round)]
            case Trained():
                return self._trained(state, event)
            case Evaluated(loss):
                state.kept.append(loss)
            case Received(_, message):
                state.params = 0.5 * (state.params + message.payload["params"])
                return [Evaluate(state.params)]  # perhaps while it trains
        return []

    def _trained(self, state: Keeper, event: Trained) -> list[Effect]:
        losses = [each for each in state.kept if isinstance(each, float)]
        is_better = len(losses) < 2 or losses[-1] <= losses[-2]
        state.params = state.params + (1.0 if is_better else 0.5) * event.delta
        state.round += 1
        message = Message("params", state.round, {"params": state.params})
        sent = Send((state.rank + 1) % self.num_workers, message)
        end = Finish() if state.round == self.num_rounds else Predict()
        noted = Note("round", {"round": state.round, "loss": event.loss})
        return [sent, Evaluate(state.params), noted, end]
