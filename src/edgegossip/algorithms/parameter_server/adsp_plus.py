"""ADSPPlus: workers never wait and commit at a given rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgegossip.algorithms.parameter_server.parameter_server import ParameterServer
from edgegossip.algorithms.parameter_server.states import TARGET, CommitterState, ServerState
from edgegossip.core.protocol import (
    Effect,
    Message,
    Rank,
    Seconds,
    Send,
    SetTimer,
)
from edgegossip.core.ranges import check_ranges
from edgegossip.core.schema import MessageSpec

WINDOW, _COMMIT = "window", "commit"
_MAX_DUE = 10**9


@dataclass(slots=True, kw_only=True)
class ADSPServerState(ServerState):
    """State of the server.

    Attributes:
        target: Total commits that each worker should have made by the end of the window.
        rate: Commits of each worker per window.
    """

    target: int = 0
    rate: int = 1


@dataclass(frozen=True, kw_only=True)
class ADSPPlus(ParameterServer):
    r"""Train without waiting, and commit at intervals that keep all workers' counts level.

    At the start of each window of :math:`\Gamma` seconds the server raises the target
    :math:`C` by the commit rate :math:`R`, and tells worker :math:`i`, which has made
    :math:`c_i` commits (a returning worker counts those that it missed), to make
    :math:`\Delta C_i` more. The worker trains step by step, and commits when its timer is due:

    .. math::
        C \leftarrow \max(C, \max_j c_j - 1) + R, \qquad
        \Delta C_i = \max(1, C - c_i), \qquad
        T_i = \max(T_{min},\; \Gamma / \Delta C_i)

    The timer runs from one send to the next, so it includes the time :math:`O_i` that a commit
    takes. The paper instead waits :math:`\Gamma / \Delta C_i - O_i` after the answer, which is
    equivalent. The server merges each commit on arrival, :math:`W \leftarrow W + U_i / M`.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits that each worker makes before it finishes.
        resend_after: See `ParameterServer`.
        window: :math:`\Gamma` in seconds, above 0.
        min_interval: :math:`T_{min}` in seconds, at least 0 and below `window`.
        rate: Commits of each worker in a window, at least 1; fixed in `ADSPPlus`, and only the
            initial rate in `ADSP`.
        waits_for_answer: If true, a worker pauses while its commit is in flight, as published.
            If false, it continues to train and adds its progress to the answer; no time is
            lost, but these steps start from a stale model. With None, it continues only if the
            last answer took longer than a step.

    Raises:
        ValueError: If a number is out of range, or `min_interval` is not below `window`.

    References:
        Hu, Wang & Wu, "Distributed machine learning through heterogeneous edge systems", AAAI
        2020, arXiv:1911.06949. Departures: workers are not halted between windows; a timer, not
        a number of steps, triggers the first commit; the minimum interval starts when a commit
        is sent; `waits_for_answer`.
    """

    window: Seconds = 60.0
    min_interval: Seconds = 10.0
    rate: int = 1
    waits_for_answer: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, window="above 0", min_interval="at least 0", rate="at least 1")
        if self.min_interval >= self.window:
            raise ValueError(
                f"min_interval must be below window, got {self.min_interval:g} and "
                f"{self.window:g}; no worker could commit within a window"
            )

    def init_worker(self, rank: Rank, params: Tensor) -> CommitterState:
        state = super().init_worker(rank, params)
        state.interval = self._interval(self.rate)
        return state

    def make_server(self, **fields: Any) -> ServerState:  # noqa: ANN401
        return ADSPServerState(**fields, rate=self.rate)

    def messages(self, params: Tensor) -> dict[str, MessageSpec]:
        """The messages of `ParameterServer`, and targets."""
        due = {"num_due": range(1, _MAX_DUE)}
        target = MessageSpec(numbers=due, max_round=self.num_rounds)
        return {**super().messages(params), TARGET: target}

    # The worker.

    def trains_on(self, state: CommitterState) -> bool:
        if self.waits_for_answer is None:
            return state.answer_seconds > state.step_seconds
        return not self.waits_for_answer

    def is_due(self, state: CommitterState) -> bool:
        return state.is_due

    def block(self, state: CommitterState) -> int:
        return 1

    def start_working(self, state: CommitterState, now: Seconds) -> list[Effect]:
        state.sent_at = now
        return [*self.committed(state, now), *super().start_working(state, now)]

    def committed(self, state: CommitterState, now: Seconds) -> list[Effect]:
        return [SetTimer(_COMMIT, state.sent_at + state.interval)]

    def wake(
        self, state: ServerState | CommitterState, name: str, now: Seconds
    ) -> list[Effect]:
        if isinstance(state, ServerState):
            return self.end_window(state, now)
        state.is_due = True
        return []

    def take_settings(
        self, state: CommitterState, numbers: Mapping[str, float], now: Seconds
    ) -> list[Effect]:
        if "num_due" not in numbers:
            return []  # this is an answer and not a target
        state.interval = self._interval(numbers["num_due"])
        return [] if state.is_due else self.committed(state, now)

    def _interval(self, num_due: float) -> Seconds:
        return max(self.min_interval, self.window / num_due)

    # The server.

    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        return self.merge_each(state)

    def start_serving(self, state: ServerState, now: Seconds) -> list[Effect]:
        return self.begin_window(state, now)

    def end_window(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Continue with the next window."""
        return self.begin_window(state, now)

    def begin_window(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Raise the target, and tell each worker how many commits it lacks."""
        assert isinstance(state, ADSPServerState)
        # A worker one commit ahead does not raise the target, or the rate would creep up.
        state.target = max(state.target, max(state.rounds.values()) - 1) + state.rate
        sends: list[Effect] = []
        for rank in self.training(state):
            num_due = state.target - state.rounds[rank]
            numbers = {"num_due": min(max(1, num_due), _MAX_DUE - 1)}
            sends.append(Send(rank, Message(TARGET, state.rounds[rank], numbers=numbers)))
        return [*sends, SetTimer(WINDOW, now + self.window)]
