"""Drive one worker of a run on a real machine, with a real clock: events in, effects out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic

from torch import Tensor

from edgegossip.contract import codec
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.metrics import staleness
from edgegossip.contract.observer import UNOBSERVED, Observer
from edgegossip.contract.protocol import (
    Assign,
    Evaluate,
    Event,
    Finish,
    Message,
    Note,
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
from edgegossip.contract.trainer import Trainer
from edgegossip.net.host.meeting import Meeting
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.receiving import ITEMS, Left, Post
from edgegossip.net.host.settings import Chore, Forecaster, HostSettings
from edgegossip.net.host.status import Phase
from edgegossip.net.host.timing import Alarms, Chores, Ending, Patience
from edgegossip.net.host.work import Completed, Judge, Work
from edgegossip.net.runtime import Course, drive
from edgegossip.net.transport import Transport

_LOG = logging.getLogger("edgegossip.net")


class Host(Generic[State]):
    """Runs an unchanged algorithm for one worker, as the simulator does for all workers.

    The caller's thread handles events and carries out effects; training, evaluation and sending
    run in other threads. Messages are validated before the algorithm sees them.

    A run begins when all workers have met or the wait for missing workers is over. A worker
    that arrives later rejoins. The run ends when all present workers have finished and nothing
    is in flight, at `settings.max_seconds`, or after `stop`.

    A worker that starts with an empty state draws a number, its *life*, and keeps it in its
    checkpoints. Messages are numbered for each pair of lives. A restarted worker is therefore
    never mistaken for one that was cut off, and messages for an earlier life are dropped.

    A checkpoint holds the state, the trainer, the timers and unhandled events. It also holds
    the newest messages that other workers' checkpoints lack, up to `settings.max_log_bytes` for
    each worker. Resumed workers, and workers whose link was cut, send each other the missing
    messages and drop duplicates. A resumed worker repeats the messages that it sent after its
    checkpoint, with the same numbers, until it loses or finds a worker. A worker that cannot be
    resumed without a gap rejoins: it takes a neighbor's parameters.

    Messages that no honest worker sends are rejected, and no worker waits for them. At its
    third such message, the sender is *muted*: it counts as lost, and all its messages are
    dropped, until another process of its rank appears.

    * A value beyond 1e30, or more than 1000 times as large as usual, is rejected. The usual
      value is the largest of five: 1, the largest initial parameter, the largest of the
      receiver's own sound parameters, the largest value in its own messages, and the median of
      the *other* senders' values of this kind and name.
    * Honest values may be that large, as the running variance of pixels from 0 to 255 is. A
      value up to 1e30 is therefore undecided as long as the receiver has not trained and no
      other worker has sent such a message; the message waits until then. It is admitted if no
      other present worker of the sender's role could send one, and always if the sender is the
      only other worker, because nobody can tell which of the two is unusual.
    * If admitted values break training, the worker goes back to the last parameters with a loss
      near its lowest, forgets momentum, and mutes the sender whose values stand out most, by at
      least a factor of two. If no sender stands out, the worker fails as it would alone.
    * Senders are served in turn, one frame each, so a flood delays only its sender. A sender of
      more than 2000 messages per second, after a burst of 100,000, is muted. A rejected frame
      counts as 100 messages, a status report as 20.
    * Relayed parts carry seals: the origin's certificate, and its signature over run, rank,
      life, kind, round and every byte. A forged seal counts as a lie by the worker that relays
      it. Without certificates nothing is signed, and a neighbor's own statement has priority
      over statements about it.

    A worker that has finished tells the others how many messages it has exchanged, in each
    direction, with each worker. When all workers have finished and all counts agree, nothing
    is in flight, and they leave.

    Args:
        algorithm: The workers' algorithm.
        rank: Rank of this worker.
        num_workers: Number of all workers.
        initial_params: Parameters that every worker starts from, [num_params].
        trainer: This worker's trainer.
        transport: Carries messages; opened and closed here.
        settings: Settings of this host.
        forecaster: Answers `Predict` and learns how long training takes; None if unused.
        evaluate: Answers `Evaluate` with loss and metrics.
        observer: Observes this worker.
        chores: Periodic chores between two events.
        save: Stores a checkpoint and returns whether it succeeded; None for no checkpoints.
        checkpoint: Stored checkpoint to resume from.
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
        self._traits = algorithm.traits
        self._settings = settings
        self._observer = observer
        self._save = save
        self._runtime = runtime = settings.runtime
        self._zero = runtime.clock()
        self._kept_at: Seconds = 0.0
        self._items = runtime.inbox()
        self._work = Work(rank, trainer, self._items, forecaster, evaluate, runtime)
        log_bytes = settings.max_log_bytes // (8 if save is None else 1)
        life, repeats = runtime.new_life(), self._traits.takes_repeats
        self.peers = Peers(rank, num_workers, life, log_bytes, settings.ended, repeats)
        self.post = Post(
            algorithm, initial_params, transport, self._items, self.peers, settings
        )
        self._work.footing = self.post.trust.footing
        self.in_training = self._work.in_training
        self.meeting = Meeting(self.peers, self.post, settings)
        self._alarms = Alarms()
        self._patience = Patience()
        self._should_stop = False
        self._ending = Ending(settings, self.post)
        self._chores = Chores(chores)
        self._checkpoint_at: Seconds = math.inf if save is None else 0.0
        # Events that came before the run began, or that a checkpoint holds.
        self._pending: list[Event] = []
        if checkpoint is not None:
            self._load(checkpoint)

    @property
    def now(self) -> Seconds:
        """Seconds since the run began."""
        return self._runtime.clock() - self._zero

    def stop(self) -> None:
        """After the current work, store a checkpoint and leave; thread-safe."""
        self._should_stop = True
        self._items.put(None)

    def run(self) -> str:
        """Take part until the end; return "finished", "time limit" or "interrupted".

        Raises:
            LocalProtocolError: If the algorithm breaks the contract.
            NetworkError: If the transport cannot be opened, too few workers join, or most of
                them have different settings.
            Exception: If training fails.
        """
        return drive(self.course(), self._items, self._runtime.clock)

    def course(self) -> Course[str]:
        """Do everything that `run` does, but leave the waiting to the driver; see `Course`."""
        try:
            has_stopped = lambda: self._should_stop  # noqa: E731
            yield from self.meeting.meet(self._take_next, lambda: self.now, has_stopped)
            if not self._should_stop:
                self._begin()
            while (reason := self._why_end()) is None:
                yield from self._take_next(self._wake_at())
            if reason == "time limit":  # the others must not count it as lost
                self.post.phase = Phase.FINISHED
                self.post.tell_all()
            return reason
        finally:
            self.post.close()
            self._work.close()

    # Meeting and beginning.

    def _begin(self) -> None:
        """Start, resume from the checkpoint, or rejoin a run that has begun."""
        peers = self.peers
        has_rejoined = peers.must_rejoin
        if has_rejoined:
            # Its state is too old, but its parameters are better than the initial ones, unless
            # they are a slice of the model. Some workers may have begun with its previous life,
            # and wait for that life's messages.
            params = self.post.trust.footing.whole(self.state.estimate)
            self.state = self._algorithm.init(self.rank, params)
            self._alarms, self._pending, self._ending.has_finished = Alarms(), [], False
            self._work.forget_questions()
            peers.live_anew(self._runtime.new_life())
        now, began_at = self._runtime.clock(), peers.began_at
        if peers.is_resumed:  # no time has passed until the others were back
            self._zero = now - self._kept_at
        elif began_at is not None and now - began_at < self._settings.max_seconds:
            self._zero = min(now, began_at)
        else:  # nobody has begun, or the claim is impossible because that run would be over
            self._zero = now
        self.post.elapsed = lambda: self.now
        events = peers.begin(has_rejoined=has_rejoined)
        self.post.phase = Phase.FINISHED if self._ending.has_finished else Phase.RUNNING
        self.post.tell_all()
        if peers.is_resumed:
            self.post.send_again()
            self._work.ask_again(self.now, self._progress)
        else:
            if has_rejoined:
                self._observer.changed(self.now, self.rank, "recovered")
            has_data = self._algorithm.role(self.rank).has_data
            events.append(self._work.started(has_rejoined, has_data, peers.life))
        events += self._pending
        self._pending = []
        self._ending.changed(self.now)
        for event in events:
            self._handle(event)
        self._watch_for_waiting()  # after resuming it may wait for a lost message

    # The loop.

    def _take_next(self, wake_at: Seconds) -> Course[None]:
        """Wait for an item until `wake_at`, and handle it."""
        item = yield self._zero + wake_at
        if isinstance(item, ITEMS):
            if self._should_stop:
                return  # it is resent when the worker resumes from the checkpoint
            for event in self.post.take(item, self.state.round, self.now):
                self._handle(event)
        elif isinstance(item, Completed):
            event = self._work.take(item, self.now)
            for each in self.post.reconsider(self.state.round, self.now):
                self._handle(each)
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
        """Carry out all due actions."""
        for name in self._alarms.pop_due(self.now):
            self._handle(TimerFired(name))
        self._chores.do_due(self.now)
        now = self.now
        if now >= self._checkpoint_at and not self._work.is_busy:
            self._keep()
        if not self._should_stop:  # a checkpoint must record no stopped worker as lost
            for event in self.peers.overdue(self._zero + now):
                self._handle(event)
            self.post.release(self._zero + now)
            if now >= self._patience.look_at:
                self._lose_patience()
            if self.post.phase == Phase.RUNNING and self.meeting.has_too_few(now):
                self.stop()
        if self.post.phase == Phase.FINISHED and now >= self._ending.tell_at:
            self.post.tell_all()

    def _wake_at(self) -> Seconds:
        moments = [self._alarms.next_at, self._latest_end, self._chores.next_at]
        if not self._should_stop:
            on_clock = min(self.peers.due_at, self.post.release_at)
            moments += [self._patience.look_at, on_clock - self._zero, self.meeting.ends_at]
        if not self._work.is_busy:
            moments.append(self._checkpoint_at)
        if self.post.phase == Phase.FINISHED:
            moments.append(self.now + self._settings.quiet_seconds)
        return min(moments)

    def _why_end(self) -> str | None:
        if self._should_stop and (not self._work.is_busy or self._work.put_off()):
            if self.peers.has_begun and self._save is not None:
                self.post.phase = Phase.LEAVING
                self._keep()
            return "interrupted"
        if self.now >= self._latest_end:
            return "time limit"
        if self._work.is_busy and self.now < self._settings.max_seconds:
            return None
        return "finished" if self._ending.is_over(self.now) else None

    @property
    def _latest_end(self) -> Seconds:
        return self._settings.max_seconds + self._settings.ending_seconds

    def _handle(self, event: Event) -> None:
        """Hand an event to the algorithm, and carry out its effects."""
        if not self.peers.has_begun:
            self._pending.append(event)
            return
        self._ending.changed(self.now, event)
        round_before = self.state.round
        if isinstance(event, Received):
            age = staleness(self.state.round, event.message.round)
            self._observer.received(self.now, self.rank, event.sender, event.message, age)
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
                case Note():
                    self._observer.noted(self.now, self.rank, effect)
        self._watch_for_waiting()
        if self.state.round != round_before:
            self._patience.next_round(self.now)

    # Effects and their results.

    @property
    def _progress(self) -> float:
        return self._traits.progress(self.state.round, self.now, self._settings.max_seconds)

    def _trained(self, event: Trained) -> None:
        self._patience.worked(event.seconds)
        now = self.now  # once: a process may be paused between two looks at the clock
        self._observer.trained(now, self.rank, now - event.seconds, event)
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
        if not self._ending.has_finished:
            self._ending.finish(self.now)
            self.post.phase = Phase.FINISHED
            self._observer.changed(self.now, self.rank, "finished")
            self.post.tell_all()

    # Waiting for others.

    def _watch_for_waiting(self) -> None:
        """Watch for a state that only a message can end: no work, no timer.

        A timer at the time limit ends the run, not a wait.
        """
        is_waiting = (
            not self._work.is_busy
            and not self._work.has_questions
            and self.post.phase == Phase.RUNNING
            and self._alarms.next_at in (self._settings.max_seconds, math.inf)
        )
        self._patience.watch(is_waiting, self.now)

    def _lose_patience(self) -> None:
        """Give up on workers that are silent past the deadline or whose messages were lost."""
        now, patience = self.now, self._patience
        patience.look_again(now)
        self.post.tell_all(again=True)
        heard_at = {rank: self.peers[rank].heard_at for rank in self.peers.active}
        silent = patience.silent(heard_at, self.post.spoke_at, now)
        for rank in dict.fromkeys([*silent, *self.peers.lacking]):
            what = "a message was lost" if rank not in silent else "nothing was heard"
            _LOG.warning("worker %d: %s for %.1f s: going on", rank, what, now - heard_at[rank])
            for event in self.peers.lose(rank):
                self._handle(event)

    # Checkpoints.

    def _keep(self) -> None:
        """Store everything that the rest of the run depends on, while nothing trains."""
        assert self._save is not None
        checkpoint = {
            "now": self.now,
            "state": self.state,
            "work": self._work.state_dict(),
            "pending": [*self._pending],
            "alarms": self._alarms.state_dict(),
            "has_finished": self._ending.has_finished,
            "peers": self.peers.state_dict(),
        }
        if self._save(checkpoint):
            self.peers.note_kept()
            self.post.tell_all()
        # Counted from the end of the last one, so that checkpoints never take all the time.
        self._checkpoint_at = self.now + self._settings.checkpoint_seconds

    def _load(self, checkpoint: Mapping[str, Any]) -> None:
        self.state = checkpoint["state"]
        if checkpoint["has_finished"]:
            self._ending.finish(checkpoint["now"])
        self._work.load_state_dict(checkpoint["work"])
        self._pending = list(checkpoint["pending"])
        self._alarms.load_state_dict(checkpoint["alarms"])
        self._kept_at, self._zero = checkpoint["now"], self._runtime.clock() - checkpoint["now"]
        self.peers.load_state_dict(checkpoint["peers"])
        self.post.trust.plausibility.went_well(self.state.estimate)
