"""Drive one worker of a run on a real machine, with a real clock: events in, effects out."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from edgegossip.contract import codec
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import NetworkError, TrainingError
from edgegossip.contract.metrics import staleness
from edgegossip.contract.observer import UNOBSERVED
from edgegossip.contract.protocol import (
    Assign,
    Evaluate,
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
    State,
    TimerFired,
    Train,
    Trained,
    WorkerLost,
)
from edgegossip.contract.trainer import Trainer
from edgegossip.net.guard.admission import Refused
from edgegossip.net.host.meeting import Ending, Meeting
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.receiving import Appeared, Disappeared, Frame, Interrupted, connect
from edgegossip.net.host.settings import HostServices, HostSettings
from edgegossip.net.host.status import Phase
from edgegossip.net.host.timing import Alarms, Chores, Patience
from edgegossip.net.host.work import Completed, LastSoundParameters, Work
from edgegossip.net.runtime import HostCoroutine, RunClock, drive
from edgegossip.net.transport import Transport

_LOG = logging.getLogger("edgegossip.net")
_LONG: Seconds = 0.1
"""Seconds in which a message is handled at a host whose messages other threads may handle."""
_CONGESTED: Seconds = 0.1
"""Seconds between two looks at what waits to be sent, before a round may begin."""


@dataclass(slots=True, eq=False)
class Ping:
    """Asks the host's thread to call `answer`, which shows that it handles events."""

    answer: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Trainings:
    """Counts the trainings of a worker since its process began.

    Attributes:
        num_samples: Samples of all trainings that have ended.
        seconds: Duration of these trainings, with the preparation of data.
        speed: Samples per second of the last one with any; None before.
    """

    num_samples: int = 0
    seconds: Seconds = 0.0
    speed: float | None = None

    def add(self, num_samples: int, seconds: Seconds) -> None:
        """Count a training that has ended."""
        self.num_samples += num_samples
        self.seconds += seconds
        if num_samples and seconds > 0:
            self.speed = num_samples / seconds


class Host(Generic[State]):
    """Runs an unchanged algorithm for one worker, as the simulator does for all workers.

    The caller's thread handles events and carries out effects. While it waits, the thread that
    brings an event may do so: one thread at a time. Training and evaluation run in other
    threads, and so does sending that takes long. Every message passes `Admission` before the
    algorithm sees it.

    A run begins when all workers have met or the wait for missing workers is over. A worker
    that arrives later rejoins. The run ends when all present workers have finished and nothing
    is in flight, at `settings.max_seconds`, or after `stop`. The page on networks describes how
    workers lose, find and mute each other.

    A worker that starts with an empty state draws a number, its *life*, and keeps it in its
    checkpoints. Messages are numbered for each pair of lives. A restarted worker is therefore
    never mistaken for one that was cut off, and messages for an earlier life are dropped. One
    that resumes from a checkpoint of a former life is back in that life, with its numbers.

    Args:
        algorithm: The workers' algorithm.
        rank: Rank of this worker.
        num_workers: Number of all workers.
        initial_params: Parameters that every worker starts from, [num_params].
        trainer: This worker's trainer.
        transport: Carries messages; opened and closed here.
        settings: Settings of this host.
        services: What this machine offers beyond training and messages.
        checkpoint: Stored checkpoint to resume from.

    Attributes:
        rank: As given.
        state: State of the algorithm.
        peers: The other workers.
        meeting: Watches how many workers are present.
        sending: Direction from this worker.
        receiving: Direction to this worker.
        trainings: What it has trained.
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
        services: HostServices = HostServices(),
        checkpoint: Mapping[str, Any] | None = None,
    ) -> None:
        self.rank = rank
        self.state: State = algorithm.init(rank, initial_params)
        self._algorithm = algorithm
        self._traits = algorithm.traits
        self._transport = transport
        self._settings = settings
        self._observer = services.observer
        self._save = services.save
        self._runtime = runtime = settings.runtime
        self._clock = clock = RunClock(runtime.clock)
        self._inbox = inbox = runtime.inbox()
        self._work = Work(rank, trainer, inbox, services.forecaster, services.evaluate, runtime)
        self._sound = LastSoundParameters(initial_params)
        # Without checkpoints, nobody resumes, and only links that come back ask for messages.
        log_bytes = settings.max_log_bytes // (8 if self._save is None else 1)
        life, repeats = runtime.new_life(), self._traits.takes_repeats
        self.peers = peers = Peers(
            rank, num_workers, life, log_bytes, settings.ended, repeats, settings.is_open
        )
        carried = (transport, inbox, peers, settings, clock, services.on_link)
        found = connect(algorithm, initial_params, *carried)
        self.sending, self.receiving, self._plausibility = found
        introductions, calls = self.receiving.introductions, transport.calls
        self.meeting = Meeting(peers, self.sending, introductions, settings, calls)
        self._ending = Ending(settings, self.sending, peers)
        self._alarms = Alarms()
        self._patience = Patience()
        peers.silence = self._patience.asks
        self.trainings = Trainings()
        self._chores = Chores(services.chores)
        self._should_stop = self._should_leave = False
        self._looks_at: Seconds = 0.0
        self._is_helped = False
        self._error: BaseException | None = None  # of a helper
        self._kept_at: Seconds = 0.0
        self._checkpoint_at: Seconds = math.inf if self._save is None else 0.0
        # Events that came before the run began, or that a checkpoint holds.
        self._pending: list[Event] = []
        # Messages that the transport has taken, or that are kept until it can, for the
        # observer: their event's time, receiver, and when they were handed over and taken.
        self._taken: deque[tuple[Seconds, Rank, Message, tuple[Seconds, Seconds]]] = deque()
        if checkpoint is not None:
            self._load(checkpoint)

    @property
    def now(self) -> Seconds:
        """Seconds since the run began."""
        return self._clock.now

    @property
    def refusals(self) -> dict[str, int]:
        """Number of rejected and missing messages, by sender and reason."""
        return self.receiving.refusals

    def in_training(self) -> list[tuple[Rank, Seconds]]:
        """The worker and the time since which it trains; empty if it does not."""
        training = self._work.training
        return [] if training is None else [(self.rank, training[1])]

    # For metrics, from any thread.

    @property
    def training_seconds(self) -> Seconds:
        """Seconds of training since the process began, the present one included."""
        training = self._work.training
        present = 0.0 if training is None else max(0.0, self.now - training[1])
        return self.trainings.seconds + present

    @property
    def waiting_seconds(self) -> Seconds:
        """Seconds since the process began in which only a message could go on."""
        return self._patience.total_waited(self.now)

    @property
    def num_queued(self) -> int:
        """Number of items that wait for the host's thread."""
        return self._inbox.qsize()

    @property
    def forecast(self) -> Predicted | None:
        """The last forecast that the algorithm asked for, if any."""
        return self._work.forecast

    def ping(self, answer: Callable[[], None]) -> None:
        """Let the host's thread call `answer` between two events."""
        self._inbox.put(Ping(answer))

    # The run.

    def stop(self) -> None:
        """After the current work, store a checkpoint and leave; thread-safe."""
        self._should_stop = True
        self._inbox.put(None)

    def leave(self) -> None:
        """Do as `stop`, and tell the others not to wait for a return; thread-safe."""
        self._should_leave = True
        self.stop()

    def run(self) -> str:
        """Take part until the end; return "finished", "time limit" or "interrupted".

        Raises:
            LocalProtocolError: If the algorithm breaks the contract.
            NetworkError: If the transport cannot be opened, too few workers join, or most of
                them have different settings.
            Exception: If training fails.
        """
        return drive(self.coroutine(), self._inbox, self._runtime.clock)

    def coroutine(self) -> HostCoroutine[str]:
        """Do everything that `run` does, but leave the waiting to the driver."""
        try:
            yield from self._meet()
            while (reason := self._why_end()) is None:
                self._looks_at = self._wake_at()
                yield from self._take_next(self._looks_at)
            if reason == "time limit":  # the others must not count it as lost
                self.sending.phase = Phase.FINISHED
                self.sending.tell_all()
            return reason
        finally:
            self._inbox.let_help(None)
            # What was sent leaves first; training may take a while to notice its cancellation.
            self.sending.close()
            self._observe_taken()
            self._transport.close()
            self._work.close()

    # Meeting and beginning.

    def _meet(self) -> HostCoroutine[None]:
        """Wait for the other workers, then begin, unless `stop` is called meanwhile."""
        meeting = self.meeting
        meeting.start(self.now)
        try:
            self._transport.open(
                self.receiving,
                self.receiving.admission.max_bytes,
                lambda: not self._should_stop and self.now < meeting.deadline,
            )
        except NetworkError:
            if not self._should_stop:
                raise
        while not self._should_stop and not meeting.is_over(self.now):
            yield from self._take_next(meeting.wake_at)
            meeting.check(self.now)
        if not self._should_stop:
            meeting.conclude()
            self._begin()

    def _begin(self) -> None:
        """Start, resume from the checkpoint, or rejoin a run that has begun."""
        peers, clock = self.peers, self._clock
        has_rejoined = peers.must_rejoin
        if has_rejoined:
            # Its state is too old, but its parameters are better than the initial ones, unless
            # they are a slice of the model. Some workers may have begun with its previous life,
            # and wait for that life's messages.
            params = self._sound.whole(self.state.estimate)
            self.state = self._algorithm.renew(self.state, params)
            self._alarms, self._pending, self._ending.has_finished = Alarms(), [], False
            self._work.forget_questions()
            peers.live_anew(self._runtime.new_life())
        now, began_at = clock.read(), peers.began_at
        if peers.is_resumed:  # no time has passed until the others were back
            clock.began_at = now - self._kept_at
        elif began_at is not None and now - began_at < self._settings.max_seconds:
            clock.began_at = min(now, began_at)
        else:  # nobody has begun, or the claim is impossible because that run would be over
            clock.began_at = now
        # Before the first status: it says with which of the others this worker has begun.
        events = peers.begin(has_rejoined=has_rejoined)
        has_finished = self._ending.has_finished
        self.sending.phase = Phase.FINISHED if has_finished else Phase.RUNNING
        # The status goes out before any message: it names this worker's life, and a receiver
        # drops messages of a life that it does not know.
        self.sending.tell_all()
        if peers.is_resumed:
            self.sending.send_again()
            self._work.ask_again(self.now, self._progress)
        else:
            if has_rejoined:
                self._observer.changed(self.now, self.rank, "recovered")
            has_data = self._algorithm.role(self.rank).has_data
            events.append(self._work.started(has_rejoined, has_data, peers.life))
        # The algorithm hears who is lost, then that it starts, and only then what came before.
        events += self._pending
        self._pending = []
        self._ending.changed(self.now)
        for event in events:
            self._handle(event)
        self._watch_for_waiting()  # after resuming it may wait for a lost message

    # The loop.

    def _take_next(self, wake_at: Seconds) -> HostCoroutine[None]:
        """Wait for an item until `wake_at`, and handle it."""
        item = yield self._clock.began_at + wake_at
        if self._error is not None:
            raise self._error
        self._take(item)
        if self.peers.has_begun:
            self._tick()

    def _help(self, item: object) -> bool:
        """Handle an item in another thread, while the host's own waits for one.

        Returns whether the host's own thread has something to do: all but the item's effects,
        which may take long, is left to it.
        """
        self._is_helped = True
        try:
            if self._error is None:
                self._take(item)
        except BaseException as error:  # the host's thread raises it
            self._error = error
        self._is_helped = False
        is_calm = self._error is None and self.sending.phase == Phase.RUNNING
        is_calm &= not (self._pending or self._should_stop)
        return not is_calm or self._wake_at() < self._looks_at

    def _take(self, item: object) -> None:
        began = self.now
        self._observe_taken()
        match item:
            case Frame() | Appeared() | Disappeared() | Interrupted() | Refused():
                if self._should_stop:
                    return  # it is resent when the worker resumes from the checkpoint
                events = self.receiving.take(item, self.state.round, self.now)
                for event in events:
                    self._handle(event)
                    if isinstance(event, WorkerLost):
                        self._looks_at = math.inf  # it looks whether too few are left
                # Threads that read are needed to read on, so they handle what is done soon.
                if events and self.peers.has_begun:
                    is_soon = self.now - began < _LONG
                    self._inbox.let_help(self._help if is_soon else None)
            case Completed():
                self._complete(item)
            case Ping(answer):
                answer()

    def _tick(self) -> None:
        """Carry out all due actions."""
        # Timers first: an algorithm's deadline must not depend on how long the chores take.
        for name in self._alarms.pop_due(self.now):
            self._handle(TimerFired(name))
        self._chores.do_due(self.now)
        # Before what is pending, which may begin to train.
        if self.now >= self._checkpoint_at and not self._work.is_busy:
            self._keep()
        if self._pending:
            self._handle_pending()
        now = self.now
        if not self._should_stop:  # a checkpoint must record no stopped worker as lost
            for event in self.peers.overdue(self._clock.began_at + now):
                self._handle(event)
            self.sending.release(self._clock.began_at + now)
            if now >= self._patience.check_at:
                self._lose_patience()
            # After the losses above, which may be what makes the workers too few.
            if self.sending.phase == Phase.RUNNING and self.meeting.has_too_few(now):
                self.stop()
        if self.sending.phase == Phase.FINISHED and now >= self._ending.tell_at:
            self.sending.tell_all(again=self._ending.repeats(now))

    def _wake_at(self) -> Seconds:
        moments = [self._alarms.next_at, self._latest_end, self._chores.next_at]
        if not self._should_stop:
            # These two times are on the machine's clock, because they also count before a run.
            on_clock = min(self.peers.due_at, self.sending.release_at)
            moments += [
                self._patience.check_at,
                on_clock - self._clock.began_at,
                self.meeting.ends_at,
            ]
        if not self._work.is_busy:
            moments.append(self._checkpoint_at)
        if self._pending:
            moments.append(self.now + _CONGESTED)
        if self.sending.phase == Phase.FINISHED:
            moments.append(self.now + self._settings.quiet_seconds)
        return min(moments)

    def _why_end(self) -> str | None:
        # No checkpoint can hold half of a training. Training that still waits for its data can
        # be put off until the worker resumes, so that a stop need not wait for the data, too.
        if self._should_stop and (not self._work.is_busy or self._work.put_off()):
            if self.peers.has_begun and self._save is not None:
                # Told with the checkpoint: the others then wait for this worker to come back.
                if not self._should_leave:  # else it says that it is gone, when it closes
                    self.sending.phase = Phase.LEAVING
                self._keep()
            return "interrupted"
        if self.now >= self._latest_end:
            return "time limit"
        # Beyond the time limit only the last messages count, so no training is awaited.
        if self._work.is_busy and self.now < self._settings.max_seconds:
            return None
        return "finished" if self._ending.is_over(self.now) else None

    @property
    def _latest_end(self) -> Seconds:
        return self._settings.max_seconds + self._settings.ending_seconds

    def _handle(self, event: Event) -> None:
        """Hand an event to the algorithm, and carry out its effects."""
        # Nothing may change a state that the worker drops if it has to rejoin.
        if not self.peers.has_begun:
            self._pending.append(event)
            return
        now, round_before = self.now, self.state.round
        self._ending.changed(now, event)
        if isinstance(event, Received):
            age = staleness(round_before, event.message.round)
            self._observer.received(now, self.rank, event.sender, event.message, age)
        for effect in self._algorithm.handle(self.state, event, now):
            match effect:
                case Train():
                    self._patience.trains = True
                    self._work.train(effect, self.now, self._progress)
                case Send():
                    self._send(effect.receiver, effect.message, now)
                case SetTimer(name, at):
                    self._alarms.set(name, at)
                case Evaluate() | Predict() | Assign():
                    self._work.ask(effect)
                case Finish():
                    self._finish()
                case Note():
                    self._observer.noted(self.now, self.rank, effect)
        # Only after all effects: each of them may give the worker something to do.
        self._watch_for_waiting()
        if self.state.round != round_before:
            self._patience.next_round(self.now)
        if (asks := self._patience.asks) != self.peers.silence:
            self.peers.silence = asks
            self.sending.tell_all()

    # Effects and their results.

    @property
    def _progress(self) -> float:
        return self._traits.progress(self.state.round, self.now, self._settings.max_seconds)

    def _complete(self, done: Completed) -> None:
        """Handle the end of background work, and what it shows about the other workers."""
        training, muted = self._work.training, list[Event]()
        try:
            event = self._work.take(done, self.now)
            if isinstance(event, Trained) and self._sound.check(event):
                self._plausibility.went_well(event.params)
        except TrainingError as error:
            if training is None:
                raise
            request, began = training
            suspect = self._plausibility.suspect() if self._sound.needs_suspect else None
            event = self._sound.go_back(request, self.now - began, error, suspect)
            self._work.start_over()
            if suspect is not None:
                why = "training failed after its messages, whose values were the largest"
                muted = self.receiving.mute(suspect, why)
        # First the loss of the suspect, whose data the algorithm drops, and what may be decided
        # now. The result of the training comes last, because it may begin the next round.
        for each in [*muted, *self.receiving.reconsider(self.state.round, self.now)]:
            self._handle(each)
        if isinstance(event, Trained):
            self._trained(event)
        else:
            self._handle(event)

    def _trained(self, event: Trained) -> None:
        self._patience.worked(event.seconds)
        self.trainings.add(event.num_samples, event.seconds)
        now = self.now  # once: a process may be paused between two looks at the clock
        self._observer.trained(now, self.rank, now - event.seconds, event)
        # The best moment for a checkpoint: nothing trains, and the state does not know the
        # result yet. As a pending event, the result is the first thing that a resumed worker
        # handles.
        self._pending.append(event)
        if self.now >= self._checkpoint_at:
            if self._is_helped:
                return  # to the host's own thread, as a checkpoint may take long
            self._keep()
        self._handle_pending()

    def _handle_pending(self) -> None:
        """Handle the result of a training, unless it has to wait."""
        if self._should_stop:
            return  # it stays pending for the last checkpoint
        # While links are cut, rounds do not wait for each other. When they are back, no worker
        # may begin rounds faster than its links carry their messages, or those that the others
        # need to join it would come ever later.
        if self._traits.is_synchronous and self.sending.is_congested:
            self._watch_for_waiting()  # the others must not take it for silent
            return
        events, self._pending = self._pending, []
        for event in events:
            self._handle(event)

    def _send(self, receiver: Rank, message: Message, now: Seconds) -> None:
        began = self.now

        def report() -> None:
            # From any thread; the observer hears of it from one that handles items. Nobody
            # wakes for that, as it would double what a small message costs.
            self._taken.append((now, receiver, message, (began, self.now)))

        is_observed = self._observer is not UNOBSERVED
        if not self.sending.send(receiver, message, report if is_observed else None):
            self._observer.lost(self.now, receiver, self.rank, message, "unreachable")

    def _observe_taken(self) -> None:
        """Tell the observer which messages the transport has taken since the last item."""
        while self._taken:
            now, receiver, message, span = self._taken.popleft()
            size = codec.num_bytes(message)
            self._observer.sent(now, self.rank, receiver, message, size, span)

    def _finish(self) -> None:
        # An algorithm may finish several times, as it must go on answering after `Finish`.
        if not self._ending.has_finished:
            self._ending.finish(self.now)
            self.sending.phase = Phase.FINISHED
            self._observer.changed(self.now, self.rank, "finished")
            self.sending.tell_all()

    # Waiting for others.

    def _watch_for_waiting(self) -> None:
        """Watch for a state without work, which only a message or a timer can end.

        A timer at the time limit ends the run, not a wait. A result that is pending because
        messages wait to be sent is looked at again soon, as if by a timer.
        """
        is_idle = (
            not self._work.is_busy
            and not self._work.has_questions
            and self.sending.phase == Phase.RUNNING
        )
        ends_run = self._alarms.next_at in (self._settings.max_seconds, math.inf)
        has_timer = bool(self._pending) or not ends_run
        self._patience.watch(is_idle, self.now, has_timer=has_timer)

    def _lose_patience(self) -> None:
        """Announce this worker; give up those that are silent or whose messages were lost."""
        now, patience = self.now, self._patience
        patience.check_again(now)
        patience.asked = self.peers.asked_silence
        # First its own status: the others may wait for the same silent worker, and must not
        # take this one for silent, too.
        self.sending.tell_all(again=True)
        if not patience.is_waiting:
            return
        heard_at = {rank: self.peers[rank].heard_at for rank in self.peers.active}
        silent = patience.silent(heard_at, self.receiving.spoke_at, now)
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
        # Only what is on the disk lets the others forget their messages to this worker.
        if self._save(checkpoint):
            self.peers.note_kept()
            self.sending.tell_all()
        # Counted from the end of the last one, so that checkpoints never take all the time.
        self._checkpoint_at = self.now + self._settings.checkpoint_seconds

    def _load(self, checkpoint: Mapping[str, Any]) -> None:
        # In the order of `_keep`. Nothing is sent before the others have been met again.
        self.state = checkpoint["state"]
        if checkpoint["has_finished"]:
            self._ending.finish(checkpoint["now"])
        self._work.load_state_dict(checkpoint["work"])
        self._pending = list(checkpoint["pending"])
        self._alarms.load_state_dict(checkpoint["alarms"])
        self._kept_at = checkpoint["now"]
        self._clock.began_at = self._clock.read() - self._kept_at
        self.peers.load_state_dict(checkpoint["peers"])
        # If it has trained, it knows what is usual, and no message need wait for that. One that
        # exchanges beside its training may have come to a new round with the first model.
        has_moved = not torch.equal(self.state.estimate, self._sound.params)
        if self.state.round > 0 and has_moved:
            self._plausibility.went_well(self.state.estimate)
