"""The worker's half of a parameter server: train, commit, receive the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from edgegossip.algorithms.server.state import (
    PATIENCE,
    RESEND,
    SERVER,
    TARGET,
    CommitterState,
    ServerState,
)
from edgegossip.algorithms.wrappers.shards.shards import SharedState
from edgegossip.algorithms.wrappers.standby.standby import StandbyState
from edgegossip.contract.algorithm import Algorithm, Traits
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Layout,
    Message,
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
)
from edgegossip.contract.ranges import check_counts, check_ranges

State: TypeAlias = ServerState | CommitterState | StandbyState | SharedState


@dataclass(frozen=True, kw_only=True)
class Committing(Algorithm[State]):
    """The worker's half of `ParameterServer`, which commits to the server."""

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

    @property
    def traits(self) -> Traits:
        return Traits(num_rounds=self.num_rounds, takes_repeats=True)

    # For algorithms to define.

    def is_due(self, state: CommitterState) -> bool:
        """Return whether a worker that has just trained must commit."""
        return state.num_asked >= state.local_steps

    def block(self, state: CommitterState) -> int:
        """Return the number of steps in one piece of training."""
        return max(1, state.local_steps - state.num_asked)

    def committed(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """React to a commit that was just sent."""
        return []

    def trains_on(self, state: CommitterState) -> bool:
        """Return whether a worker trains while its commit is in flight."""
        return False

    def take_settings(
        self, state: CommitterState, numbers: Mapping[str, float], now: Seconds
    ) -> list[Effect]:
        """Apply the server's settings, from an answer or a message between answers."""
        return []

    def wake(
        self, state: ServerState | CommitterState, name: str, now: Seconds
    ) -> list[Effect]:
        """Handle a timer."""
        return []

    # Common to all algorithms.

    def work(self, state: CommitterState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                state.layout, state.is_pulling = event.layout, event.has_rejoined
                return self.start_working(state, now)
            case Trained():
                state.is_training = False
                if event.has_gone_back:
                    return self._go_back(state, event, now)
                self._learn(state, event)
                return self.go_on(state, now)
            case Received() if event.sender == SERVER:
                return self._hear(state, event.message, now)
            case TimerFired(name) if name == RESEND:
                return self._send_again(state, now)
            case TimerFired(name) if name == PATIENCE:
                self._give_up(state)
            case TimerFired():
                return [*self.wake(state, event.name, now), *self.go_on(state, now)]
            case WorkerLost() if event.rank == SERVER:
                state.has_server = False
                return [SetTimer(PATIENCE, now + self.patience)]
            case WorkerJoined() if event.rank == SERVER:
                state.has_server = True
                patience = SetTimer(PATIENCE, math.inf)
                return [patience, *self._send_again(state, now), *self.go_on(state, now)]
        return []

    def _hear(self, state: CommitterState, message: Message, now: Seconds) -> list[Effect]:
        match message.kind:
            case "params":
                return [*self._take_answer(state, message, now), *self.go_on(state, now)]
            case "show":
                return [self._copy(state)]
            case "again":
                return self._send_again(state, now)
            case kind if kind == TARGET:
                return self.take_settings(state, message.numbers, now)
        return []  # no server sends this to a worker

    def start_working(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """Begin as a worker: train, or ask for the model after a return."""
        return [*self._send_again(state, now), *self.go_on(state, now)]

    def go_on(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """Commit if due, and train unless the worker must wait."""
        if state.is_pulling or state.is_training:
            return []
        commit: list[Effect] = []
        if state.commit is None and state.num_asked and self.is_due(state):
            commit = self._commit(state, now)
        if state.round >= self.num_rounds and state.commit is None:
            return [*commit, Finish()]
        if not state.has_server or (state.commit is not None and not self.trains_on(state)):
            return commit
        if state.round + (state.commit is not None) >= self.num_rounds:
            return commit  # the last commit is in flight
        state.is_training, num_steps = True, self.block(state)
        state.num_asked += num_steps
        train = Train(
            state.params,
            Steps(num_steps),
            rate_ratio=self.rate_ratio,
            momentum=self.momentum,
        )
        return [*commit, train]

    def _give_up(self, state: CommitterState) -> None:
        if state.round < self.num_rounds:
            raise ServerLostError(
                f"worker {state.rank} has waited {self.patience:g} s for the server, rank "
                f"{SERVER}, which is lost; start it again, and continue with --resume"
            )

    def _go_back(self, state: CommitterState, event: Trained, now: Seconds) -> list[Effect]:
        """Drop progress made from unsound parameters, and ask for the model."""
        state.params, state.commit, state.committed = event.params, None, None
        state.num_asked, state.num_steps = 0, 0
        state.is_due, state.has_moved = False, False
        state.is_pulling, state.num_sends = True, 0
        return self._send_again(state, now)

    def _layout(self, state: CommitterState) -> Layout:
        return state.layout or Layout(state.params.numel())

    def _learn(self, state: CommitterState, event: Trained) -> None:
        if state.has_moved:
            # Answers that arrived during training stay in, but statistics must be as measured.
            moved = state.params + event.delta
            state.params = self._layout(state).with_statistics(moved, event.params)
        else:
            state.params = event.params
        state.has_moved = False
        state.num_steps += event.num_steps
        if event.num_steps:
            state.step_seconds = event.seconds / event.num_steps

    def _commit(self, state: CommitterState, now: Seconds) -> list[Effect]:
        layout = self._layout(state)
        update = layout.with_statistics(state.params - state.base, state.params)
        numbers = {
            "number": state.next_number,
            "num_steps": state.num_steps,
            "num_trained": layout.num_trained,
            "version": int(state.counts.sum()),
        }
        state.commit = Message("commit", state.round, {"update": update}, numbers)
        state.committed, state.sent_at = state.params, now
        state.num_asked, state.num_steps, state.is_due = 0, 0, False
        return [*self._send_again(state, now), *self.committed(state, now)]

    def _send_again(self, state: CommitterState, now: Seconds) -> list[Effect]:
        """Send or resend the open commit or pull, if the server is reachable."""
        message = Message("pull", state.round) if state.is_pulling else state.commit
        if message is None or not state.has_server:
            return []
        send = Send(SERVER, message)
        if self.resend_after is None:
            return [send]
        # The interval grows, because repeated requests would delay a slow answer further.
        state.num_sends += 1
        return [send, SetTimer(RESEND, now + self.resend_after * state.num_sends)]

    def _take_answer(
        self, state: CommitterState, message: Message, now: Seconds
    ) -> list[Effect]:
        counts = message.payload["counts"]
        num_merged = int(counts[state.rank - 1])
        settings = self.take_settings(state, message.numbers, now) if message.numbers else []
        if not state.is_pulling and (
            state.commit is None or num_merged < state.commit.numbers["number"]
        ):
            return settings  # a duplicate answer to a resent commit
        if state.commit is not None:
            state.answer_seconds = now - state.sent_at
        base = message.payload["params"]
        if state.num_steps and state.committed is not None:
            # Progress made while the commit was in flight stays, and goes into the next commit.
            moved = base + (state.params - state.committed)
            state.params = self._layout(state).with_statistics(moved, state.params)
        else:
            state.params = base
        state.has_moved = state.is_training
        state.base, state.commit, state.committed = base, None, None
        state.num_commits, state.counts = num_merged, counts
        state.memory = {**message.numbers}
        state.is_pulling, state.num_sends = False, 0
        state.round = max(state.round, message.round)
        return settings

    def _copy(self, state: CommitterState) -> Send:
        """Report the newest received model to a restarted server."""
        if state.is_pulling and not state.counts.any():
            return Send(SERVER, Message("pull", state.round))  # no model to report
        payload = {"params": state.base, "counts": state.counts}
        numbers = {**state.memory, "number": state.last_number}
        return Send(SERVER, Message("copy", state.round, payload, numbers))
