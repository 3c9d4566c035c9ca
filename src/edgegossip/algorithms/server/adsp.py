"""ADSP+ and ADSP: workers never wait, and commit at a rate that is given or searched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from edgegossip.algorithms.server.commit_search import CommitSearch, Tried, implicit_momentum
from edgegossip.algorithms.server.parameter_server import ParameterServer, ServerState
from edgegossip.algorithms.server.reward import LogSlope, Reward
from edgegossip.algorithms.server.worker import CommitterState
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Message,
    Rank,
    Seconds,
    Send,
    SetTimer,
    Trained,
)
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.schema import Limits, MessageSpec

_MAX_COUNT = 10**9
_LARGEST = 1e300


@dataclass(slots=True, kw_only=True)
class TimedCommitterState(CommitterState):
    """State of a worker whose commits a timer triggers.

    Attributes:
        interval: Seconds between two commits.
        is_due: Whether the timer has fired since the last commit.
        sent_at: Time at which the last commit was sent or work began.
        answer_seconds: Time from the last answered commit to its answer.
        step_seconds: Duration of a step in the last piece of training.
    """

    interval: Seconds
    is_due: bool = False
    sent_at: Seconds = 0.0
    answer_seconds: Seconds = 0.0
    step_seconds: Seconds = math.inf


@dataclass(slots=True, kw_only=True)
class ADSPServerState(ServerState):
    """State of the server.

    Attributes:
        target: Total commits that each worker should have made by the end of the window.
        rate: Commits of each worker per window.
    """

    target: int = 0
    rate: int = 1


@dataclass(slots=True, kw_only=True)
class SearchingServerState(ADSPServerState):
    """State of the server of `ADSP`.

    Attributes:
        search: State of the search for the rate.
        asked_at: Request times of the losses that are being measured.
        num_windows: Number of windows since the start of the search.
        steps_before: `num_steps` when the window began.
        commits_before: `num_commits` when the window began.
    """

    search: CommitSearch
    asked_at: list[Seconds] = field(default_factory=list)
    num_windows: int = 0
    steps_before: dict[Rank, int] = field(default_factory=dict)
    commits_before: dict[Rank, int] = field(default_factory=dict)


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
        answer, interval = self.no_answer(params), self._interval(self.rate)
        return TimedCommitterState(rank=rank, params=params, answer=answer, interval=interval)

    def make_server(self, **fields: Any) -> ServerState:  # noqa: ANN401
        return ADSPServerState(**fields, rate=self.rate)

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """The messages of `ParameterServer`, and targets."""
        due = {"num_due": range(1, _MAX_COUNT)}
        target = MessageSpec(numbers=due, max_round=self.num_rounds)
        return {**super().schema(params), "target": target}

    # The worker.

    def trains_on(self, state: CommitterState) -> bool:
        assert isinstance(state, TimedCommitterState)
        if self.waits_for_answer is None:
            return state.answer_seconds > state.step_seconds
        return not self.waits_for_answer

    def is_due(self, state: CommitterState) -> bool:
        assert isinstance(state, TimedCommitterState)
        return state.is_due

    def block(self, state: CommitterState) -> int:
        return 1  # the timer may fire at any step

    def start_working(self, state: CommitterState, now: Seconds) -> list[Effect]:
        assert isinstance(state, TimedCommitterState)
        state.sent_at = now
        return [self._timer(state), *super().start_working(state, now)]

    def committed(self, state: CommitterState, now: Seconds) -> list[Effect]:
        assert isinstance(state, TimedCommitterState)
        # From the send, not from the answer: a slow network must not lower the commit rate.
        state.sent_at, state.is_due = now, False
        return [self._timer(state)]

    def answered(self, state: CommitterState, now: Seconds) -> None:
        assert isinstance(state, TimedCommitterState)
        state.answer_seconds = now - state.sent_at

    def learn(self, state: CommitterState, event: Trained) -> None:
        super().learn(state, event)
        assert isinstance(state, TimedCommitterState)
        if event.num_steps:
            state.step_seconds = event.seconds / event.num_steps

    def go_back(self, state: CommitterState, event: Trained, now: Seconds) -> list[Effect]:
        assert isinstance(state, TimedCommitterState)
        state.is_due = False  # there is no progress to commit
        return super().go_back(state, event, now)

    def wake_worker(self, state: CommitterState, now: Seconds) -> list[Effect]:
        assert isinstance(state, TimedCommitterState)
        state.is_due = True
        return []

    def take_settings(
        self, state: CommitterState, numbers: Mapping[str, float], now: Seconds
    ) -> list[Effect]:
        assert isinstance(state, TimedCommitterState)
        if "num_due" not in numbers:
            return []  # this is an answer and not a target
        state.interval = self._interval(numbers["num_due"])
        # The new interval counts from the last send. A commit that is due stays due.
        return [] if state.is_due else [self._timer(state)]

    def _timer(self, state: TimedCommitterState) -> SetTimer:
        return SetTimer("commit", state.sent_at + state.interval)

    def _interval(self, num_due: float) -> Seconds:
        return max(self.min_interval, self.window / num_due)

    # The server.

    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        return self.merge_each(state)

    def start_serving(self, state: ServerState, now: Seconds) -> list[Effect]:
        return self.begin_window(state, now)

    def wake_server(self, state: ServerState, now: Seconds) -> list[Effect]:
        return self.begin_window(state, now)

    def begin_window(self, state: ServerState, now: Seconds) -> list[Effect]:
        """Raise the target, and tell each worker how many commits it lacks."""
        assert isinstance(state, ADSPServerState)
        # A worker one commit ahead does not raise the target, or the rate would creep up.
        state.target = max(state.target, max(state.rounds.values()) - 1) + state.rate
        sends: list[Effect] = []
        for rank in self.training(state):
            num_due = state.target - state.rounds[rank]
            numbers = {"num_due": min(max(1, num_due), _MAX_COUNT - 1)}
            sends.append(Send(rank, Message("target", state.rounds[rank], numbers=numbers)))
        return [*sends, SetTimer("window", now + self.window)]


@dataclass(frozen=True, kw_only=True)
class ADSP(ADSPPlus):
    r"""Search for the commit rate online, while workers train without waiting.

    ADSP extends `ADSPPlus`. During each window the server measures its model's loss on
    validation data, and a reward measures how fast the loss fell. While rewards rise, the next
    window tries a higher rate (see `CommitSearch`). The best rate is kept until the epoch is
    over, or until the loss has risen by `loss_rise` between the ends of two successive windows.
    A new search then begins from the current rate.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits that each worker makes before it finishes.
        resend_after: See `ParameterServer`.
        window: :math:`\Gamma`; see `ADSPPlus`.
        min_interval: See `ADSPPlus`. Rates above `window / min_interval` are not tried, except
            `rate` itself.
        rate: The first rate to try.
        waits_for_answer: See `ADSPPlus`.
        reward: Rating of a window: `LogSlope`, `ConstrainedFit` or `PaperReward`.
        windows_per_epoch: Windows until a new search begins, at least 2; 20 in the paper.
        loss_rise: Relative rise of the loss that starts a new search, above 0.
        growth: Ratio of a rate to the previous one, at least 1; with 1, each window tries one
            more commit, as published.

    Raises:
        ValueError: If a number is out of range, or `min_interval` is not below `window`.

    References:
        Hu, Wang & Wu, AAAI 2020, arXiv:1911.06949, Algorithms 1 and 2, and the published code.
        Departures, in addition to those of `ADSPPlus`: the default reward; `growth`, without
        which it takes ten windows to find a rate of ten; the loss is measured on validation
        data; below the highest rate, the search does not end before the loss falls in a window.
    """

    evaluates: ClassVar[bool] = True
    reward: Reward = LogSlope()
    windows_per_epoch: int = 20
    loss_rise: float = 0.3
    growth: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, windows_per_epoch="at least 2", loss_rise="above 0")
        check_ranges(self, growth="at least 1 and finite")

    @property
    def max_rate(self) -> int:
        """The highest rate that the minimum interval allows; 1000 if the interval is 0."""
        return max(1, int(self.window / self.min_interval)) if self.min_interval else 1000

    def make_server(self, **fields: Any) -> ServerState:  # noqa: ANN401
        search = CommitSearch(growth=self.growth, rate=self.rate)
        return SearchingServerState(**fields, search=search, rate=self.rate)

    @property
    def optional_limits(self) -> Mapping[str, Limits]:
        count = range(1, _MAX_COUNT)
        return {
            "rate": count,
            "best_rate": count,
            "best_reward": (-_LARGEST, _LARGEST),
            "is_searching": range(2),
            "num_windows": range(_MAX_COUNT),
        }

    def settings(self, state: ServerState, rank: Rank) -> Mapping[str, float]:
        # Workers use none of these; they are the memory of a server that restarts.
        assert isinstance(state, SearchingServerState)
        search = state.search
        numbers: dict[str, float] = {
            "rate": search.rate,
            "best_rate": search.best_rate,
            "is_searching": int(search.is_searching),
            "num_windows": state.num_windows,
        }
        if math.isfinite(search.best_reward):
            numbers["best_reward"] = search.best_reward
        return numbers

    def recall(self, state: ServerState, numbers: Mapping[str, float]) -> None:
        assert isinstance(state, SearchingServerState)
        search = state.search
        # A liar's rate would flood the server with commits.
        search.rate = min(int(numbers.get("rate", search.rate)), self.max_rate)
        search.best_rate = min(int(numbers.get("best_rate", search.best_rate)), self.max_rate)
        search.best_reward = numbers.get("best_reward", search.best_reward)
        search.is_searching = bool(numbers.get("is_searching", search.is_searching))
        state.num_windows = int(numbers.get("num_windows", 0))

    def start_serving(self, state: ServerState, now: Seconds) -> list[Effect]:
        return [*super().start_serving(state, now), *self._look(state, now)]

    def begin_window(self, state: ServerState, now: Seconds) -> list[Effect]:
        assert isinstance(state, SearchingServerState)
        state.rate = state.search.rate
        state.steps_before, state.commits_before = {**state.num_steps}, {**state.num_commits}
        # The timer measures losses within the window, and the last of them ends it.
        *sends, _ = super().begin_window(state, now)
        return [*sends, SetTimer("window", now + self._until_look(state))]

    def wake_server(self, state: ServerState, now: Seconds) -> list[Effect]:
        assert isinstance(state, SearchingServerState)
        # Losses that are still being measured count, because an evaluation may take longer
        # than the time between two of them.
        num_looks = len(state.search.looks) + len(state.asked_at)
        effects = self._look(state, now)
        if state.search.is_searching and num_looks + 1 < self.reward.num_looks:
            effects.append(SetTimer("window", now + self._until_look(state)))
        return effects

    def _until_look(self, state: SearchingServerState) -> Seconds:
        num_spans = self.reward.num_looks - 1 if state.search.is_searching else 1
        return self.window / num_spans

    def _look(self, state: ServerState, now: Seconds) -> list[Effect]:
        assert isinstance(state, SearchingServerState)
        state.asked_at.append(now)
        return [Evaluate(state.params)]

    def judged(self, state: ServerState, loss: float, now: Seconds) -> list[Effect]:
        assert isinstance(state, SearchingServerState)
        if not state.asked_at:
            return []  # no loss was requested, so a liar has made this one up
        search = state.search
        # Losses count at the time of the request, because the model is that of the request.
        search.looks.append((state.asked_at.pop(0), loss))
        num_looks = self.reward.num_looks if search.is_searching else 2
        if len(search.looks) < num_looks:
            return []
        rate, is_trial = search.rate, search.is_searching
        reward = self.reward(search.looks) if is_trial else None
        if reward is not None:
            search.judge(reward, self.max_rate)
        state.num_windows += 1
        window = state.num_windows
        # After `judge`, which may have ended the search that a new one replaces.
        has_risen = loss >= (1 + self.loss_rise) * search.looks[0][1]
        if has_risen or state.num_windows >= self.windows_per_epoch:
            search.begin()
            state.num_windows = 0
        commits = {j: n - state.commits_before[j] for j, n in state.num_commits.items()}
        tried = Tried(
            at=now,
            window=window,
            rate=rate,
            reward=reward,
            loss=loss,
            num_commits=sum(commits.values()),
            implicit_momentum=self._implicit_momentum(state, commits),
        )
        search.tried.append(tried)
        search.looks = [search.looks[-1]]  # the end of a window is the start of the next
        return [tried.note, *self.begin_window(state, now)]

    def _implicit_momentum(
        self, state: SearchingServerState, commits: Mapping[Rank, int]
    ) -> float | None:
        """The momentum of Theorem 1, from the commits and steps of this window."""
        steps = {j: n - state.steps_before[j] for j, n in state.num_steps.items()}
        active = [j for j in self.workers if commits[j] > 0 and steps[j] > 0]
        return implicit_momentum([steps[j] / commits[j] for j in active]) if active else None
