"""The worker's side of a parameter server: train, commit, receive the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Layout,
    Message,
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
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.ranges import check_counts, check_ranges

SERVER: Rank = 0
"""The server's rank."""
MAX_COUNT = 2**52
"""Largest number of a commit, and of a worker's commits in a model."""


@dataclass(slots=True, kw_only=True)
class CommitterState(WorkerState):
    """State of a worker that trains and commits its progress to the server.

    Attributes:
        answer: The server's last answer: the model that `params` started from (`params -
            base` is not committed yet), the commits in it, and the server's settings.
        layout: See `Started.layout`.
        commit: The unanswered commit, if any.
        committed: The parameters when `commit` was sent.
        num_sends: Number of times that the unanswered message was sent; each lengthens the
            wait.
        local_steps: SGD steps between two commits, from the server's last message.
        num_asked: Number of steps requested since the last commit; a wrapper may run fewer.
        num_steps: Number of steps since the last commit.
        is_training: Whether a `Train` is running.
        has_moved: Whether an answer has changed the parameters since that training began.
        is_pulling: Whether the worker needs the server's model before it continues to train.
        has_server: Whether the server is reachable.
    """

    answer: Message
    layout: Layout | None = None
    commit: Message | None = None
    committed: Tensor | None = None
    num_sends: int = 0
    local_steps: int = 1
    num_asked: int = 0
    num_steps: int = 0
    is_training: bool = False
    has_moved: bool = False
    is_pulling: bool = False
    has_server: bool = True

    @property
    def base(self) -> Tensor:
        """The model of the last answer, [num_params]."""
        return self.answer.payload["params"]

    @property
    def counts(self) -> Tensor:
        """The commits of each worker in that model, [num_workers]."""
        return self.answer.payload["counts"]

    @property
    def num_commits(self) -> int:
        """Number of this worker's answered commits."""
        return int(self.counts[self.rank - 1])

    @property
    def next_number(self) -> int:
        """Number of the commit after the last answered one."""
        # A server that lies may have claimed `MAX_COUNT` commits; no receiver allows more.
        return min(self.num_commits + 1, MAX_COUNT)

    @property
    def last_number(self) -> int:
        """Number of the last commit sent; no server can have merged a later one."""
        return self.num_commits if self.commit is None else self.next_number


@dataclass(frozen=True, kw_only=True)
class Committer:
    """The worker's side of `ParameterServer`, which documents the arguments."""

    num_rounds: int
    resend_after: Seconds | None = None
    patience: Seconds = 600.0
    rate_ratio: float = 1.0
    momentum: float | None = None

    def __post_init__(self) -> None:
        check_counts(self, "num_rounds")
        check_ranges(self, num_rounds="at least 1", patience="above 0")
        check_ranges(self, resend_after="above 0 or None", rate_ratio="above 0 and finite")
        check_ranges(self, momentum="in [0, 1) or None")

    # For algorithms to define.

    def is_due(self, state: CommitterState) -> bool:
        """Return whether a worker that has just trained must commit."""
        return state.num_asked >= state.local_steps

    def block(self, state: CommitterState) -> int:
        """Return the number of steps in one piece of training."""
        return max(1, state.local_steps - state.num_asked)

    def trains_on(self, state: CommitterState) -> bool:
        """Return whether a worker trains while its commit is in flight."""
        return False

    def commit_numbers(self, state: CommitterState) -> Mapping[str, float]:
        """Numbers of the algorithm's own in a commit."""
        return {}

    def committed(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """React to a commit that was just sent."""
        return []

    def answered(self, state: CommitterState, now: Seconds) -> None:
        """React to the first answer to the open commit."""

    def divide(self, state: CommitterState, commit: Message) -> tuple[Message, Tensor]:
        """Return what to send of a commit, and the parameters that it leads to."""
        return commit, state.params

    def rebased(self, state: CommitterState, base: Tensor) -> Tensor:
        """Return the parameters that continue from an answer, the model `base`."""
        if state.num_steps and state.committed is not None:
            # Progress made while the commit was in flight stays, and goes into the next commit.
            moved = base + (state.params - state.committed)
            return self._layout(state).with_statistics(moved, state.params)
        return base

    def take_settings(
        self, state: CommitterState, numbers: Mapping[str, float], now: Seconds
    ) -> list[Effect]:
        """Apply the server's settings, from an answer or a message between answers."""
        return []

    def wake_worker(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """Handle the algorithm's own timer."""
        return []

    # Common to all algorithms.

    def handle_as_worker(
        self, state: CommitterState, event: Event, now: Seconds
    ) -> list[Effect]:
        """Handle `event` as a worker."""
        match event:
            case Started():
                # A worker that comes back has forgotten its commits. The answer to its pull
                # says at which number they continue.
                state.layout, state.is_pulling = event.layout, event.has_rejoined
                return self.start_working(state, now)
            case Trained():
                state.is_training = False
                if event.has_gone_back:
                    return self.go_back(state, event, now)
                self.learn(state, event)
                return self.go_on(state, now)
            case Received(sender, message) if sender == SERVER:
                return self._hear(state, message, now)
            case TimerFired("resend"):
                return self._send_open(state, now)
            case TimerFired("patience"):
                # The timer may fire after the last round: a worker that has finished needs no
                # server, so only an unfinished one gives up.
                if state.round < self.num_rounds:
                    raise self.gives_up(f"worker {state.rank}", f"the server, rank {SERVER}")
            case TimerFired():
                return [*self.wake_worker(state, now), *self.go_on(state, now)]
            case WorkerLost() if event.rank == SERVER:
                state.has_server = False
                return [SetTimer("patience", now + self.patience)]
            case WorkerJoined() if event.rank == SERVER:
                # The commit goes out again at once, whatever the resend timer says: the link
                # has lost it, or the server has forgotten it.
                state.has_server = True
                patience = SetTimer("patience", math.inf)
                return [patience, *self._send_open(state, now), *self.go_on(state, now)]
        return []

    def _hear(self, state: CommitterState, message: Message, now: Seconds) -> list[Effect]:
        match message.kind:
            case "params":
                return [*self._take_answer(state, message, now), *self.go_on(state, now)]
            case "show":
                return [self._report(state)]
            case "again":
                return self._send_open(state, now)
            case "target":
                return self.take_settings(state, message.numbers, now)
        return []  # no server sends this to a worker

    def start_working(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """Begin as a worker: train, or ask for the model after a return."""
        return [*self._send_open(state, now), *self.go_on(state, now)]

    def go_on(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """Commit if due, and train unless the worker must wait."""
        if state.is_pulling or state.is_training:
            return []
        commit: list[Effect] = []
        # One commit is in flight at a time, so that a number names one content: the server
        # could not tell a repeated commit from a new one.
        if state.commit is None and state.num_asked and self.is_due(state):
            commit = self._commit(state, now)
        # Not before the last answer: the commit may be lost, and must then be sent again.
        if state.round >= self.num_rounds and state.commit is None:
            return [*commit, Finish()]
        if not state.has_server or (state.commit is not None and not self.trains_on(state)):
            return commit
        # Steps after the last commit would never be committed.
        if state.round + (state.commit is not None) >= self.num_rounds:
            return commit
        state.is_training, num_steps = True, self.block(state)
        state.num_asked += num_steps
        train = Train(
            state.params,
            Steps(num_steps),
            rate_ratio=self.rate_ratio,
            momentum=self.momentum,
        )
        return [*commit, train]

    def gives_up(self, who: str, whom: str) -> ServerLostError:
        """Build the error for `who`, which has waited for `whom` in vain."""
        return ServerLostError(
            f"{who} has waited {self.patience:g} s for {whom}, which is lost; start it again, "
            "and continue with --resume"
        )

    def go_back(self, state: CommitterState, event: Trained, now: Seconds) -> list[Effect]:
        """Drop progress made from unsound parameters, and ask for the model."""
        # The open commit was made from these parameters too. If the server has counted it, the
        # answer to the pull says so, and the next commit gets the next number.
        state.params, state.commit, state.committed = event.params, None, None
        state.num_asked, state.num_steps, state.has_moved = 0, 0, False
        state.is_pulling, state.num_sends = True, 0
        return self._send_open(state, now)

    def _layout(self, state: CommitterState) -> Layout:
        return state.layout or Layout(state.params.numel())

    def learn(self, state: CommitterState, event: Trained) -> None:
        """Take the result of a piece of training."""
        if state.has_moved:
            # The answer that arrived during the training stays in. Statistics must be as
            # measured: a sum of differences could make a variance negative.
            moved = state.params + event.delta
            state.params = self._layout(state).with_statistics(moved, event.params)
        else:
            state.params = event.params  # exact, where adding the change would round
        state.has_moved = False
        state.num_steps += event.num_steps

    # Commits and answers.

    def _commit(self, state: CommitterState, now: Seconds) -> list[Effect]:
        layout = self._layout(state)
        update = layout.with_statistics(state.params - state.base, state.params)
        numbers = {
            "number": state.next_number,
            "num_steps": state.num_steps,
            "num_trained": layout.num_trained,
            "version": int(state.counts.sum()),
            **self.commit_numbers(state),
        }
        whole = Message("commit", state.round, {"update": update}, numbers)
        # Kept, because what the worker learns from here on is not part of this commit.
        state.commit, state.committed = self.divide(state, whole)
        state.num_asked, state.num_steps = 0, 0
        return [*self._send_open(state, now), *self.committed(state, now)]

    def _send_open(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """Send or resend the open commit or pull, if the server is reachable."""
        message = Message("pull", state.round) if state.is_pulling else state.commit
        if message is None or not state.has_server:
            return []  # nothing is open, or the server's return sends it again
        send = Send(SERVER, message)
        if self.resend_after is None:
            return [send]
        # The interval grows, because repeated requests would delay a slow answer further.
        state.num_sends += 1
        return [send, SetTimer("resend", now + self.resend_after * state.num_sends)]

    def _take_answer(
        self, state: CommitterState, answer: Message, now: Seconds
    ) -> list[Effect]:
        counts, base = answer.payload["counts"], answer.payload["params"]
        settings = self.take_settings(state, answer.numbers, now) if answer.numbers else []
        num_known = int(counts[state.rank - 1])
        # An answer that lacks the open commit was sent before the server had it, for an earlier
        # request that was repeated. Taking it would lose the commit from the parameters.
        if not state.is_pulling and (
            state.commit is None or num_known < state.commit.numbers["number"]
        ):
            # A server that knows fewer commits than were answered has restarted. A worker that
            # has finished sends no more of them, so the server would wait forever.
            has_forgotten = state.commit is None and num_known < state.num_commits
            return [*settings, self._report(state)] if has_forgotten else settings
        if state.commit is not None:
            self.answered(state, now)
        state.params = self.rebased(state, base)
        # The piece of training that is running started from other parameters.
        state.has_moved = state.is_training
        state.answer, state.commit, state.committed = answer, None, None
        state.is_pulling, state.num_sends = False, 0
        # The server may have let a worker that came back skip rounds, but never goes back.
        state.round = max(state.round, answer.round)
        return settings

    def _report(self, state: CommitterState) -> Send:
        """Report the newest received model to a restarted server."""
        if state.is_pulling and not state.counts.any():
            # A worker without a model repeats its pull: the restarted server may never have got
            # the first one, and would wait for this worker's report.
            return Send(SERVER, Message("pull", state.round))
        # The settings of the last answer are the restarted server's memory.
        numbers = {**state.answer.numbers, "number": state.last_number}
        return Send(SERVER, Message("copy", state.round, state.answer.payload, numbers))
