"""The learners in one actor, on one core of the cluster."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgegossip.contract.errors import EdgeGossipError, TrainingError
from edgegossip.contract.protocol import Train
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.integrations.ray.twin import Origin
from edgegossip.runs.describe import versions


@dataclass(slots=True)
class Order:
    """A piece of work for the learner with this serial number.

    `origin` and `state` are given if the learner is missing at the desk or has a different
    state; `state` is None for a new learner.
    """

    serial: int
    request: Train
    progress: float
    origin: Origin | None = None
    state: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Reply:
    """The result of a piece of work and the state after it, or the reason why there is none."""

    result: TrainingResult | None = None
    state: Mapping[str, Any] | None = None
    error: Exception | None = None
    seconds: float = 0.0
    making_seconds: float | None = None
    warnings: list[tuple[str, type[Warning]]] = field(default_factory=list)


class LearnersDesk:
    """Trains its learners one after another.

    Args:
        look_up: Finds the function to which `Origin.maker` refers.
    """

    def __init__(self, look_up: Callable[[Any], Any]) -> None:
        self._look_up = look_up
        self._makers: dict[Any, Any] = {}
        self._trainers: dict[int, Trainer] = {}
        self._made_by: dict[int, Any] = {}

    def versions(self) -> dict[str, str]:
        """Return the versions of Python and packages here."""
        return versions()

    def work(self, forgotten: Sequence[int], orders: Sequence[Order]) -> list[Reply]:
        """Forget learners that have moved, and carry out orders."""
        for serial in forgotten:
            self._trainers.pop(serial, None)
            self._made_by.pop(serial, None)
        if forgotten:  # data of a run that is over makes room
            used = {*self._made_by.values()}
            self._makers = {key: make for key, make in self._makers.items() if key in used}
        return [self._reply(order) for order in orders]

    def _reply(self, order: Order) -> Reply:
        reply = Reply()
        with warnings.catch_warnings(record=True) as caught:
            try:
                self._do(order, reply)
            except EdgeGossipError as error:
                reply.error = error
            except Exception as error:  # perhaps of a class that others do not know
                text = "".join(traceback.format_exception(error))
                reply.error = TrainingError(f"training failed with {error!r:.300}\n{text}")
        reply.warnings = [(str(each.message), each.category) for each in caught]
        return reply

    def _do(self, order: Order, reply: Reply) -> None:
        start = time.perf_counter()
        if order.origin is not None:
            self._trainers[order.serial] = self._made(order.origin, order.state)
            self._made_by[order.serial] = order.origin.maker
            reply.making_seconds = time.perf_counter() - start
            start += reply.making_seconds
        trainer = self._trainers[order.serial]
        result = trainer.train(order.request, order.progress)
        reply.seconds = time.perf_counter() - start
        reply.state = trainer.state_dict()
        reply.result = result
        trainer.rest()

    def _made(self, origin: Origin, state: Mapping[str, Any] | None) -> Trainer:
        if origin.maker not in self._makers:
            self._makers[origin.maker] = self._look_up(origin.maker)
        trainer: Trainer = self._makers[origin.maker](origin.rank, origin.incarnation)
        if state is not None:
            trainer.load_state_dict(state)
        trainer.set_up()
        return trainer
