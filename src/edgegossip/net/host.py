"""Drive one worker of a run on a real machine: events in, effects out, on a real clock."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic

from torch import Tensor

from edgegossip.core import codec
from edgegossip.core.algorithm import Algorithm
from edgegossip.core.metrics import staleness
from edgegossip.core.observer import UNOBSERVED, Observer
from edgegossip.core.protocol import (
    Assign,
    Evaluate,
    Event,
    Finish,
    Message,
    Predict,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    State,
    TimerFired,
    Train,
    Trained,
)
from edgegossip.core.trainer import Trainer
from edgegossip.net.alarms import Alarms, Chores
from edgegossip.net.fair_queue import FairQueue
from edgegossip.net.host_settings import Chore, Forecaster, HostSettings
from edgegossip.net.patience import Patience
from edgegossip.net.peers import Peers
from edgegossip.net.post import ITEMS, Left, Post
from edgegossip.net.status import Phase, new_life
from edgegossip.net.transport import Transport
from edgegossip.net.work import Completed, Judge, Work

_LOG = logging.getLogger("edgegossip.net")
_AGAIN: Seconds = 1.0
"""While workers meet: between two accounts of oneself, should one have been lost."""
_STRAGGLERS: Seconds = 2.0
"""How long to wait for the others once somebody has begun."""


class Host(Generic[State]):
    """Runs an algorithm for one worker, unchanged, as the simulator does for all of them.

    One thread, the caller's, handles events and carries out effects; training, evaluation and
    sending run beside it. What arrives is checked before the algorithm sees it.

    A run begins when all workers have met, or the wait for the missing is over. A worker that
    comes when others have begun rejoins. The run ends when everyone who is there has finished
    and nothing is under way, at `settings.max_seconds`, or after `stop`.

    Args:
        algorithm: What the workers do.
        rank: Whose part this is.
        num_workers: In all.
        initial_params: What every worker starts from, [num_params].
        trainer: This worker's.
        transport: Carries messages; opened and closed here.
        settings: Of this host.
        forecaster: Answers `Predict`, and is told what training took; None if nobody asks.
        evaluate: Answers `Evaluate` with (loss, accuracy).
        observer: Sees what happens to this worker.
        chores: What else is to be done from time to time, between two events.
        save: Keeps a checkpoint and says whether it could; None for none.
        checkpoint: One that was kept, to go on from.
    """

    def __init__(
        self,
        algorithm: Algorithm[State],
        rank: Rank,
        num_workers: int,
        initial_params: Tensor,
        trainer: Trainer,
        transport: Transport,
        *,
        settings: HostSettings,
        forecaster: Forecaster | None = None,
        evaluate: Judge | None = None,
        observer: Observer = UNOBSERVED,
        chores: tuple[Chore, ...] = (),
        save: Callable[[dict[str, Any]], bool] | None = None,
        checkpoint: Mapping[str, Any] | None = None,
    ) -> None:
        self.rank = rank
        self.state: State = algorithm.init(rank, initial_params)
        self._algorithm = algorithm
        self._settings = settings
        self._observer = observer
        self._save = save
        self._zero = settings.clock()
        self._kept_at: Seconds = 0.0
        self._items = FairQueue()
        self._work = Work(rank, trainer, self._items, forecaster, evaluate, settings.clock)
        log_bytes = 0 if save is None else settings.max_log_bytes
        self.peers = Peers(
            rank, num_workers, new_life(), max_log_bytes=log_bytes, ended=settings.ended
        )
        self.post = Post(
            algorithm, initial_params, transport, self._items, self.peers, settings
        )
        self._work.footing = self.post.footing
        self._alarms = Alarms()
        self._patience = Patience()
        self._changed_at: Seconds = math.inf
        self._should_stop = self._has_finished = False
        self._chores = Chores(chores)
        self._checkpoint_at: Seconds = math.inf if save is None else 0.0
        # Events that came before the run began, or that a checkpoint holds.
        self._pending: list[Event] = []
        if checkpoint is not None:
            self._load(checkpoint)

    @property
    def now(self) -> Seconds:
        """Seconds since the run began."""
        return self._settings.clock() - self._zero

    def stop(self) -> None:
        """Keep a checkpoint when the work under way is done, and leave; from any thread."""
        self._should_stop = True
        self._items.put(None)

    def run(self) -> str:
        """Take part until the end; say how it ended: "finished", "time limit", "interrupted".

        Raises:
            LocalProtocolError: If the algorithm breaks the contract.
            NetworkError: If the transport cannot be opened.
            Exception: Whatever training raises.
        """
        self.post.open()
        try:
            self._meet()
            if not self._should_stop:
                self._begin()
            while (reason := self._why_end()) is None:
                self._take_next(self._wake_at())
            return reason
        finally:
            self.post.close()
            self._work.close()

    # Meeting and beginning.

    def _meet(self) -> None:
        """Wait until everyone is here, or for as long as it is worth it."""
        peers, deadline = self.peers, self.now + self._settings.meet_seconds
        again = self.now + _AGAIN
        while not (peers.are_all_here or self._should_stop) and self.now < deadline:
            self._take_next(min(deadline, again))
            if self.now >= again:
                again = self.now + _AGAIN
                self.post.tell_all(again=True)
            if peers.began_at is not None:
                deadline = min(deadline, self.now + _STRAGGLERS)
        if peers.missing and not self._should_stop:
            what = "absent, or of other settings; their shares of the data go untrained"
            _LOG.warning("beginning without %s: %s", peers.missing, what)

    def _begin(self) -> None:
        """Start, go on from the checkpoint, or rejoin those who have begun."""
        peers = self.peers
        has_rejoined = peers.must_rejoin
        if has_rejoined and peers.is_resumed:
            # What it knows is too old; its parameters are better than the initial ones.
            self.state = self._algorithm.init(self.rank, self.state.estimate)
            self._alarms, self._has_finished, self._pending = Alarms(), False, []
            self._work.forget_questions()
            peers.live_anew(new_life())
        now, began_at = self._settings.clock(), peers.began_at
        if peers.is_resumed:  # time stood still until the others were back
            self._zero = now - self._kept_at
        else:
            self._zero = now if began_at is None else min(now, began_at)
        self.post.elapsed = lambda: self.now
        events = peers.begin()
        self.post.phase = Phase.FINISHED if self._has_finished else Phase.RUNNING
        self.post.tell_all()
        if peers.is_resumed:
            self.post.send_again()
            self._work.ask_again()
        else:
            if has_rejoined:
                self._observer.changed(self.now, self.rank, "recovered")
            has_data = self._algorithm.role(self.rank).has_data
            events.append(self._work.started(has_rejoined, has_data))
        events += self._pending
        self._pending = []
        self._changed_at = self.now
        for event in events:
            self._handle(event)

    # The loop.

    def _take_next(self, wake_at: Seconds) -> None:
        """Wait for something to happen until `wake_at`, and account for it."""
        item = self._items.get(timeout=max(0.0, min(wake_at - self.now, 3600.0)))
        if isinstance(item, ITEMS):
            if self._should_stop:
                return  # it will be sent again to whoever goes on from the checkpoint
            for event in self.post.take(item, self.state.round, self.now):
                self._handle(event)
        elif isinstance(item, Completed):
            event = self._work.take(item, self.now)
            if isinstance(event, Trained):
                self._trained(event)
            else:
                self._handle(event)
        elif isinstance(item, Left):
            receiver, message, began = item.receiver, item.message, item.handed_over
            sent = (message, codec.num_bytes(message), (began, self.now))
            self._observer.sent(began, self.rank, receiver, *sent)
        elif item is not None:
            self._handle(item)
        if self.peers.has_begun:
            self._tick()

    def _tick(self) -> None:
        """Do what is due."""
        for name in self._alarms.pop_due(self.now):
            self._handle(TimerFired(name))
        self._chores.do_due(self.now)
        if self.now >= self._checkpoint_at and not self._work.is_busy:
            self._keep()
        if not self._should_stop:  # a checkpoint must not take who stopped before for lost
            for event in self.peers.overdue(self._settings.clock()):
                self._handle(event)
            self._lose_patience()
        if (
            self.post.phase == Phase.FINISHED
            and self.now >= self._changed_at + self._settings.quiet_seconds
        ):
            self.post.tell_all()

    def _wake_at(self) -> Seconds:
        at = min([self._alarms.next_at, self._settings.max_seconds, self._chores.next_at])
        if not self._should_stop:
            at = min(at, self._patience.look_at, self.peers.lose_at - self._zero)
        if not self._work.is_busy:
            at = min(at, self._checkpoint_at)
        if self.post.phase == Phase.FINISHED:
            at = min(at, self.now + self._settings.quiet_seconds)
        return at

    def _why_end(self) -> str | None:
        if self._should_stop and not self._work.is_busy:
            if self.peers.has_begun and self._save is not None:
                self.post.phase = Phase.LEAVING
                self._keep()
            return "interrupted"
        if self.now >= self._settings.max_seconds:
            return "time limit"
        if not self._has_finished or self._work.is_busy:
            return None
        quiet = self.now - self._changed_at
        if quiet > 2 * self._settings.quiet_seconds and self.post.is_over:
            return "finished"
        # Counts that still disagree: something was lost on its way.
        has_settled = quiet > self._settings.settle_seconds
        return "finished" if has_settled and self.peers.have_all_finished else None

    def _handle(self, event: Event) -> None:
        """Hand an event to the algorithm, and carry out what it wants."""
        if not self.peers.has_begun:
            self._pending.append(event)
            return
        self._changed_at, round_before = self.now, self.state.round
        if isinstance(event, Received):
            age = staleness(self.state.round, event.message.round)
            self._observer.received(self.now, self.rank, event.sender, age)
        for effect in self._algorithm.handle(self.state, event, self.now):
            match effect:
                case Train():
                    self._work.train(effect, self.now, self._progress)
                case Send():
                    self._send(effect.receiver, effect.message)
                case SetTimer(name, at):
                    self._alarms.set(name, at)
                case Evaluate() | Predict() | Assign():
                    self._work.ask(effect)
                case Finish():
                    self._finish()
        self._watch_for_waiting()
        if self.state.round != round_before:
            self._patience.next_round()

    # Effects, and what comes of them.

    @property
    def _progress(self) -> float:
        limit = self._settings.max_seconds
        return self._algorithm.traits.progress(self.state.round, self.now, limit)

    def _trained(self, event: Trained) -> None:
        self._patience.worked(event.seconds)
        self._observer.trained(self.now, self.rank, self.now - event.seconds, event)
        self._pending.append(event)
        if self.now >= self._checkpoint_at:
            self._keep()
        if not self._should_stop:
            self._pending.clear()
            self._handle(event)

    def _send(self, receiver: Rank, message: Message) -> None:
        left = Left(receiver, message, self.now)
        report = None if self._observer is UNOBSERVED else lambda: self._items.put(left)
        if not self.post.send(receiver, message, report):
            self._observer.lost(self.now, receiver, self.rank, message, "unreachable")

    def _finish(self) -> None:
        if not self._has_finished:
            self._has_finished, self.post.phase = True, Phase.FINISHED
            self._observer.changed(self.now, self.rank, "finished")
            self.post.tell_all()

    # Waiting for others.

    def _watch_for_waiting(self) -> None:
        """Only a message can wake a worker that neither works nor has set a timer."""
        is_waiting = (
            not self._work.is_busy
            and not self._work.has_questions
            and self.post.phase == Phase.RUNNING
            and self._alarms.next_at == math.inf
        )
        self._patience.watch(is_waiting, self.now)

    def _lose_patience(self) -> None:
        """Give up those who have been silent for longer than a wait has ever taken."""
        now, patience = self.now, self._patience
        if now < patience.look_at:
            return
        patience.look_again(now)
        self.post.tell_all(again=True)
        heard_at = {rank: self.peers[rank].heard_at for rank in self.peers.active}
        for rank in patience.silent(heard_at, self.post.spoke_at, now):
            _LOG.warning(
                "nothing from worker %d for %.1f s: going on", rank, now - heard_at[rank]
            )
            for event in self.peers.lose(rank):
                self._handle(event)

    # Checkpoints.

    def _keep(self) -> None:
        """Keep everything that the rest of the run depends on, while nothing trains."""
        assert self._save is not None
        checkpoint = {
            "now": self.now,
            "state": self.state,
            "work": self._work.state_dict(),
            "pending": [*self._pending],
            "alarms": self._alarms.state_dict(),
            "has_finished": self._has_finished,
            "peers": self.peers.state_dict(),
        }
        if self._save(checkpoint):
            self.peers.note_kept()
        # Counted from its end: keeping must not become all that is done.
        self._checkpoint_at = self.now + self._settings.checkpoint_seconds
        self.post.tell_all(again=True)

    def _load(self, checkpoint: Mapping[str, Any]) -> None:
        self.state, self._has_finished = checkpoint["state"], checkpoint["has_finished"]
        self._work.load_state_dict(checkpoint["work"])
        self._pending = list(checkpoint["pending"])
        self._alarms.load_state_dict(checkpoint["alarms"])
        self._kept_at = checkpoint["now"]
        self._zero = self._settings.clock() - self._kept_at
        self.peers.load_state_dict(checkpoint["peers"])
