"""A server that learns from blocks of local steps, as long as each worker's speed permits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from edgegossip.algorithms.server.parameter_server import (
    ParameterServer,
    ServerState,
    change_of,
)
from edgegossip.algorithms.server.worker import CommitterState
from edgegossip.contract.algorithm import Traits
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Layout,
    Message,
    Predict,
    Predicted,
    Rank,
    Seconds,
    Trained,
)
from edgegossip.contract.ranges import check_choices, check_counts, check_ranges
from edgegossip.contract.schema import Limits, MessageSpec

SPEEDS = ("measured", "forecast", "equal")
_MAX_SPEED = 1e12
_MAX_LEAD = 8.0
"""Largest number that one worker may claim, as a multiple of the next largest one."""


@dataclass(slots=True, kw_only=True)
class PacedCommitterState(CommitterState):
    """State of a worker whose blocks have as many steps as its speed permits.

    Attributes:
        speed: Its speed in steps per second; 0 while it is unknown.
        samples_per_step: Samples in a step of the last piece of training.
    """

    speed: float = 0.0
    samples_per_step: float = 1.0


@dataclass(slots=True, kw_only=True)
class OuterServerState(ServerState):
    """State of the server.

    Attributes:
        speeds: The last reported speed of each worker, in steps per second.
    """

    speeds: dict[Rank, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OuterServer(ParameterServer):
    r"""Base of servers that take outer steps on commits of several local steps.

    *Dynamic local updates* give slow workers shorter blocks, so that all commit equally often
    (but for one that is more than 8 times as fast as all others, which commits more often):
    worker :math:`i`, which takes :math:`v_i` steps per second, commits after

    .. math:: H_i = \max\bigl(1, \lfloor H\, v_i / \max_j v_j \rfloor\bigr)

    steps. Each commit reports :math:`v_i`, and each answer names the speed of the fastest
    worker that trains. A worker's first block has :math:`H` steps. The server cannot check a
    speed, so it takes the fastest one for at most 8 times as fast as the next: a liar shortens
    the blocks of the fastest other worker to an eighth at worst.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker.
        resend_after: See `ParameterServer`.
        local_steps: :math:`H`, SGD steps of the fastest worker between two commits, at least 1.
        outer_lr: :math:`\alpha`, above 0; at 1, commits of all workers add up to their mean.
        speeds: "measured" takes :math:`v_i` from the worker's last piece of training,
            "forecast" from the forecast for its next one, and with "equal" every worker takes
            :math:`H` steps.

    Raises:
        ValueError: If a number is out of range, or `speeds` is another word.
    """

    local_steps: int = 32
    outer_lr: float = 1.0
    speeds: str = "measured"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "local_steps")
        check_ranges(self, local_steps="at least 1", outer_lr="above 0 and finite")
        check_choices(self, speeds=SPEEDS)
        if self.robust is not None:
            raise ValueError(
                f"{type(self).__name__} takes outer steps on commits one by one, and has no "
                "robust rule; leave out robust, or take BSP, FixedADACOMM or DiLoCo"
            )

    # For algorithms to define.

    @abstractmethod
    def absorb(self, state: Any, commits: list[Message]) -> None:  # noqa: ANN401 - its own
        """Take commits, which are counted and in order of ranks, into the server's state."""

    # Common to all of them.

    @property
    def traits(self) -> Traits:
        local_steps = self.local_steps if self.speeds == "equal" else None
        return replace(super().traits, local_steps=local_steps)

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """The messages of `ParameterServer`; commits also carry a speed."""
        specs = super().schema(params)
        numbers = {**specs["commit"].numbers, "pace": (0.0, _MAX_SPEED)}
        return {**specs, "commit": replace(specs["commit"], numbers=numbers)}

    # The worker.

    def init_worker(self, rank: Rank, params: Tensor) -> CommitterState:
        return self.make_worker(
            rank=rank,
            params=params,
            answer=self.no_answer(params),
            local_steps=self.local_steps,
        )

    def make_worker(self, **fields: Any) -> PacedCommitterState:  # noqa: ANN401 - of the state
        """Make the state of a worker."""
        return PacedCommitterState(**fields)

    def handle_as_worker(
        self, state: CommitterState, event: Event, now: Seconds
    ) -> list[Effect]:
        """Handle `event` as a worker."""
        if isinstance(event, Predicted):
            assert isinstance(state, PacedCommitterState)
            state.speed = min(event.throughput / state.samples_per_step, _MAX_SPEED)
            return []
        return super().handle_as_worker(state, event, now)

    def learn(self, state: CommitterState, event: Trained) -> None:
        super().learn(state, event)
        assert isinstance(state, PacedCommitterState)
        if event.num_steps and event.num_samples:
            state.samples_per_step = event.num_samples / event.num_steps
        if event.num_steps and event.seconds > 0 and self.speeds != "forecast":
            state.speed = min(event.num_steps / event.seconds, _MAX_SPEED)

    def commit_numbers(self, state: CommitterState) -> Mapping[str, float]:
        assert isinstance(state, PacedCommitterState)
        # Not "speed": `BatchTune` adds a number of that name, in samples per second.
        return {"pace": state.speed}

    def committed(self, state: CommitterState, now: Seconds) -> list[Effect]:
        # Asked while the commit is in flight, so that the forecast is there when the answer
        # comes and the next block begins.
        return [Predict()] if self.speeds == "forecast" else []

    def take_settings(
        self, state: CommitterState, numbers: Mapping[str, float], now: Seconds
    ) -> list[Effect]:
        assert isinstance(state, PacedCommitterState)
        fastest = max(numbers["fastest"], state.speed)
        if state.speed and self.speeds != "equal":
            # The ratio first: it is exactly 1 for the fastest, which must not lose a step.
            state.local_steps = max(1, math.floor(self.local_steps * (state.speed / fastest)))
        return []

    # The server.

    def make_server(self, **fields: Any) -> OuterServerState:  # noqa: ANN401
        return OuterServerState(**fields)

    @property
    def limits(self) -> Mapping[str, Limits]:
        return {"fastest": (0.0, _MAX_SPEED)}

    def settings(self, state: ServerState, rank: Rank) -> Mapping[str, float]:
        assert isinstance(state, OuterServerState)
        return {"fastest": largest_credible(self.known_speeds(state).values())}

    def known_speeds(self, state: OuterServerState) -> dict[Rank, float]:
        """The last reported speeds, in steps per second."""
        # A fast worker that is lost must not keep the others' blocks short.
        return {j: state.speeds[j] for j in self.training(state) if j in state.speeds}

    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        return self.take(state, sorted(state.waiting))

    def take(self, state: ServerState, ranks: list[Rank]) -> list[Effect]:
        """Absorb and answer the waiting commits of `ranks`."""
        assert isinstance(state, OuterServerState)
        for rank in ranks:
            state.speeds[rank] = state.waiting[rank].numbers["pace"]
            state.count(rank, self.num_rounds)
        self.absorb(state, [state.waiting[rank] for rank in ranks])
        # All are absorbed before the first answer: commits that wait together get one model.
        return [self.answer(state, rank) for rank in ranks]


def largest_credible(claims: Iterable[float]) -> float:
    """Return the largest claim, or 8 times the next one if that is less; 0 if all are 0.

    One liar alone cannot raise the next largest claim. The server's clock does not help: a
    worker that is as fast as it claims may have a slow link, and a liar can commit as often as
    it pretends to.
    """
    *_, next_one, largest = [0.0, 0.0, *sorted(claims)]
    return min(largest, _MAX_LEAD * next_one) if next_one else largest


def progress_of(commit: Message) -> Tensor:
    """Return a commit's change of the trained entries, [num_params]; others are 0."""
    layout, update = Layout(int(commit.numbers["num_trained"])), commit.payload["update"]
    return layout.with_statistics(update, torch.zeros_like(update[:1]).expand_as(update))


def with_statistics(commit: Message, step: Tensor, params: Tensor, share: float) -> Tensor:
    """Return `step`, and `share` of the way from the running statistics in `params` to those of
    the commit, [num_params].

    Statistics are merged as measured: extrapolated by momentum, a variance could become
    negative.
    """
    layout = Layout(int(commit.numbers["num_trained"]))
    if layout.num_trained == step.numel():
        return step
    return layout.with_statistics(step, share * change_of(commit, params))
