"""Run an algorithm over many workers in virtual time."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic

from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import LocalProtocolError, deadlock_error, no_validation_data
from edgegossip.contract.metrics import staleness
from edgegossip.contract.observer import UNOBSERVED, Observer
from edgegossip.contract.protocol import (
    Assign,
    Assigned,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Note,
    Predict,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    State,
    TimerFired,
    Train,
)
from edgegossip.machine.energy import Energy
from edgegossip.machine.goodput import NodeUse
from edgegossip.sim.agenda import (
    Absence,
    Agenda,
    Alarm,
    Delivery,
    Evaluating,
    FirstByte,
    InTraining,
    Start,
    WorkerRecord,
    forget_gone,
)
from edgegossip.sim.fault import (
    Arrival,
    Crash,
    Detection,
    Faults,
    Leave,
    Partition,
    Recover,
)
from edgegossip.sim.link import Links
from edgegossip.sim.machines import (
    FORECAST_SECONDS,
    Machines,
    MakeEvaluator,
    MakePredictor,
    same_for_all,
)
from edgegossip.sim.membership import Membership, Notice
from edgegossip.sim.network import InitialParams, Network, Outgoing, initial_params_of
from edgegossip.sim.platform import Platform
from edgegossip.sim.poisoner import Poisoner
from edgegossip.sim.pool import ComputePool, MakeTrainer


@contextmanager
def rare_collections() -> Iterator[None]:
    """Make Python search for reference cycles a hundred times less often.

    The event loop makes and drops thousands of objects without cycles, while the states and
    events of all workers stay alive; the collector traverses these living objects again and
    again. With 10,000 workers, that took 40 % of the time (benchmarks/results/simulator.md).
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


_KEPT = (
    "now",
    "num_events",
    "states",
    "_records",
    "_membership",
    "_num_open",
    "_num_recoveries",
)


class Simulator(Generic[State]):
    """A discrete-event loop: pop the earliest event, handle it, and carry out its effects.

    Two runs with equal arguments process the same events at the same virtual times in the same
    order, and end with the same result, bit for bit. Ties are broken by insertion order.
    Nothing here reads a clock or draws from a global generator. The loop waits for real
    training only when virtual time reaches the end of that training.

    The run is over when every online worker has finished and no work or message is in flight.
    Timers do not keep it open; a future recovery does, but only while no worker is online.

    Args:
        algorithm: Algorithm of the workers.
        platforms: One for each worker.
        initial_params: Initial parameters of every worker, [num_params], or a function of the
            rank.
        make_trainer: Makes a worker's trainer at its first training.
        make_predictor: Makes the predictor of a worker's throughput; the default starts from
            the idle platform's throughput and follows measurements.
        links: Latencies and bandwidths.
        faults: Script of the faults.
        pool: Pool for training; by default the caller's thread.
        observer: Observer of all events.
        evaluate: Answers the `Evaluate` effects of all workers with loss and metrics.
        evaluation_cost: Cost of an evaluation for the platform, in training samples.
        evaluators: Finds each worker's evaluator, in place of `evaluate` and `evaluation_cost`.
        wire: Encode and decode every message, as a network would.
        max_seconds: Time limit of the run, for `Traits.progress`.
    """

    def __init__(
        self,
        algorithm: Algorithm[State],
        platforms: Sequence[Platform],
        initial_params: InitialParams,
        make_trainer: MakeTrainer,
        *,
        make_predictor: MakePredictor | None = None,
        links: Links | None = None,
        faults: Faults | None = None,
        pool: ComputePool | None = None,
        observer: Observer | None = None,
        evaluate: Callable[[Tensor], tuple[float, Mapping[str, float]]] | None = None,
        evaluation_cost: float = 0.0,
        evaluators: MakeEvaluator | None = None,
        wire: bool = False,
        max_seconds: Seconds = math.inf,
    ) -> None:
        self.now: Seconds = 0.0
        self.num_events = 0
        self.should_stop = False
        self._algorithm = algorithm
        self._traits = algorithm.traits
        self._initial_params = initial_params
        self.states = [self._new_state(rank) for rank in range(len(platforms))]
        self._pool = pool or ComputePool(0)
        self._machines = Machines(platforms, make_trainer, make_predictor)
        self._faults = faults = faults or Faults()
        outgoing = Outgoing(algorithm, initial_params)
        self._network = Network(links or Links(), faults, platforms, outgoing, wire=wire)
        self._poisoner = Poisoner(faults.poisons) if faults.poisons else None
        self._observer = observer or UNOBSERVED
        self._evaluator_of = evaluators or same_for_all(evaluate, evaluation_cost)
        self._max_seconds = max_seconds
        self._records = [WorkerRecord() for _ in platforms]
        self._membership = Membership(
            is_online=[True] * len(platforms),
            partitions=tuple(fault for fault in faults.script if isinstance(fault, Partition)),
        )
        self._agenda = Agenda()
        # Reasons to keep the run going: unfinished workers, work and messages under way.
        absent = faults.absent
        self._num_open = len(platforms) - len(absent)
        self._num_recoveries = 0
        # Faults come first, so that a worker which crashes at time 0 never starts.
        for at, rank, item in self._faults.schedule():
            self._num_recoveries += isinstance(item, Recover | Arrival)
            self._agenda.push(at, rank, item)
        for rank in sorted(absent):
            self._machines.absent(rank)
            self._agenda.push(0.0, rank, Absence())
        self._tell(self._membership.absent(absent))
        for rank in range(len(platforms)):
            if rank not in absent:
                self._agenda.push(0.0, rank, Start())

    # The loop.

    @property
    def is_anyone_online(self) -> bool:
        """Whether any worker has not crashed, or is back."""
        return any(self._membership.is_online)

    @property
    def is_over(self) -> bool:
        """Whether all online workers have finished and nothing is in flight."""
        return not self._num_open and (self.is_anyone_online or self._num_recoveries == 0)

    @property
    def has_finished(self) -> bool:
        """Whether all online workers have finished; work and messages may be in flight."""
        records = zip(self._records, self._membership.is_online, strict=True)
        return all(record.has_finished for record, is_online in records if is_online)

    @property
    def next_at(self) -> Seconds:
        """Time of the next event; infinite if there is none."""
        return self._agenda.times[0] if self._agenda.times else math.inf

    @rare_collections()
    def run(self, until: Seconds = math.inf) -> bool:
        """Process events up to and including time `until`; return whether the run is over.

        The loop stops early, between two events, when `should_stop` is set.

        Raises:
            LocalProtocolError: If the algorithm breaks the contract or waits forever.
        """
        agenda, times = self._agenda, self._agenda.times
        # CPython 3.11 specializes the code of a loop only if its jump back has no condition.
        while True:
            if not times or times[0] > until or self.should_stop:
                break
            # The counter first: most events find it above 0, and need no more than that.
            if not self._num_open and self.is_over:
                break
            self.now, rank, item = agenda.pop()
            self.num_events += 1
            resolver = _RESOLVE.get(type(item))
            # Items that the algorithm itself understands need no work of the simulator: data
            # that is ready, forecasts, and news about other workers.
            if resolver is None:
                self._handle(rank, item)
            else:
                resolver(self, rank, item)
        if not times and not self.is_over:
            self._report_hang()
        return self.is_over

    @property
    def in_training(self) -> list[tuple[Rank, Seconds]]:
        """The workers that are training, and since when."""
        records = enumerate(self._records)
        return [(rank, record.training.start) for rank, record in records if record.training]

    def energy(self, now: Seconds) -> Energy | None:
        """Energy of all platforms and links up to `now`, a time between the last event and the
        next; None if the run began with a version that did not count it.

        Bytes count when a message is handed over, as in `bytes_sent`.
        """
        if not self._machines.knows_energy:
            return None
        return self._machines.energy(now) + Energy(links=self._network.joules)

    def use(self, now: Seconds) -> NodeUse | None:
        """Use of all platforms up to `now`, as in `energy`; the training in progress counts."""
        if not self._machines.knows_use:
            return None
        training = {
            rank: (record.training.began, record.training.cost)
            for rank, record in enumerate(self._records)
            if record.training
        }
        has_data = [self._algorithm.role(rank).has_data for rank in range(len(self._records))]
        return self._machines.use(now, has_data, training)

    def estimates(self) -> dict[Rank, Tensor]:
        """The parameters to evaluate, for the ranks that `Membership.evaluated` selects."""
        ranks = self._membership.evaluated(self._algorithm.role, self.states)
        # The outcome of an attack is what it does to the honest; but some model there must be.
        honest = [rank for rank in ranks if rank not in self._faults.liars] or ranks
        return {rank: self.states[rank].estimate for rank in honest}

    def _new_state(self, rank: Rank) -> State:
        return self._algorithm.init(rank, initial_params_of(self._initial_params, rank))

    def _handle(self, rank: Rank, event: Event) -> None:
        # A forecast or a notice may have been on its way when the worker crashed.
        if not self._membership.is_online[rank]:
            return
        # In order: the first of two messages has the uplink first. No effect calls the
        # algorithm again: its events wait in the agenda, so `handle` is never nested.
        for effect in self._algorithm.handle(self.states[rank], event, self.now):
            _CARRY_OUT[type(effect)](self, rank, effect)

    def _report_hang(self) -> None:
        ranks = (rank for rank, record in enumerate(self._records) if not record.has_finished)
        waiting = [rank for rank in ranks if self._membership.is_online[rank]]
        raise deadlock_error(self.now, waiting)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """All state that the rest of the run depends on; waits for running work."""
        # Real training in progress is computed to its end. Its virtual end stays in the agenda.
        for record in self._records:
            record.wait()
        values = {name: getattr(self, name) for name in _KEPT}
        agenda = {"entries": list(self._agenda), "serial": self._agenda.serial}
        return {
            **values,
            "agenda": agenda,
            "machines": self._machines.state_dict(),
            "link_joules": self._network.joules,
            **({} if self._poisoner is None else {"poison": self._poisoner.memory}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of a simulator with the same arguments."""
        for name in _KEPT:
            setattr(self, name, state[name])
        self._agenda.load(**state["agenda"])
        self._machines.load_state_dict(state["machines"])
        self._network.joules = state.get("link_joules", 0.0)
        if self._poisoner is not None:
            self._poisoner.memory = state["poison"]

    # Work that keeps a platform busy: getting ready, training, evaluating.

    def _start(self, rank: Rank, start: Start) -> None:
        if self._membership.is_online[rank]:
            # A rank without data, such as a server, needs no trainer, which would hold a model.
            has_data = self._algorithm.role(rank).has_data
            data = self._get_ready(rank) if has_data else (0, 0.0)
            trainer = self._machines.trainer(rank) if has_data else None
            layout, units = (trainer.layout, trainer.num_units) if trainer else (None, 0)
            started = Started(start.has_rejoined, *data, layout=layout, num_units=units)
            self._handle(rank, started)

    def _assign(self, rank: Rank, effect: Assign) -> None:
        if self._records[rank].training is not None:
            raise LocalProtocolError(f"worker {rank} asked for other data while it trains")
        # At once, so that the next `Train` sees the new data. It begins when the platform has
        # prepared them.
        self._machines.trainer(rank).assign(effect.ranks)
        self._agenda.push(self.now, rank, Assigned(*self._get_ready(rank)))

    def _get_ready(self, rank: Rank) -> tuple[int, float]:
        """Schedule data preparation; return the number of samples and the cost of a pass."""
        trainer = self._machines.trainer(rank)
        self._machines.occupy(rank, self.now, trainer.setup_cost)
        return trainer.num_samples, trainer.epoch_cost

    def _train(self, rank: Rank, effect: Train) -> None:
        record = self._records[rank]
        if record.training is not None:
            raise LocalProtocolError(f"worker {rank} asked for a second Train at once")
        trainer = self._machines.trainer(rank)
        cost = trainer.cost(effect)
        began, end = self._machines.begin_training(rank, self.now, cost)
        progress = self._traits.progress(self.states[rank].round, self.now, self._max_seconds)
        # Real training begins now, on another thread, and its result is needed only at its
        # virtual end. Meanwhile the loop goes on with other workers' events.
        pending = self._pool.train(trainer, effect, progress)
        record.training = InTraining(self.now, began, effect.params, cost, pending)
        self._num_open += 1
        self._agenda.push(end, rank, record.training)

    def _finish_training(self, rank: Rank, training: InTraining) -> None:
        self._records[rank].training = None
        self._num_open -= 1
        event = training.finish(self.now)
        if self._poisoner is not None:
            self._poisoner.trained(rank, event.before)
        # From when the platform was free, or waiting would look like slow training.
        self._machines.monitor(rank).trained(training.began, self.now)
        self._machines.work[rank].end_training(training.cost, event.num_samples)
        self._observer.trained(self.now, rank, training.start, event)
        self._handle(rank, event)
        if self._records[rank].leaves:
            self._leave_now(rank)

    def _evaluate(self, rank: Rank, effect: Evaluate) -> None:
        # Not counted in `_num_open`: answers to `Evaluate` do not keep a run open.
        if (evaluator := self._evaluator_of(rank)) is None:
            raise no_validation_data(rank)
        _, end = self._machines.occupy(rank, self.now, evaluator.cost)
        self._agenda.push(end, rank, Evaluating(effect.params))

    def _finish_evaluation(self, rank: Rank, evaluating: Evaluating) -> None:
        evaluator = self._evaluator_of(rank)
        assert evaluator is not None
        self._handle(rank, Evaluated(*evaluator.evaluate(evaluating.params)))

    def _predict(self, rank: Rank, effect: Predict) -> None:
        predicted = self._machines.monitor(rank).forecast(self.now)
        self._agenda.push(self.now + FORECAST_SECONDS, rank, predicted)

    # Messages.

    def _send(self, rank: Rank, effect: Send) -> None:
        record = self._records[rank]
        if self._poisoner is not None:
            target = self.states[effect.receiver].estimate
            effect = self._poisoner.send(self.now, rank, effect, target)
        delivery = self._network.send(self.now, record, rank, effect, self._agenda.serial)
        receiver, message = delivery.receiver, delivery.message
        uplink = (delivery.start, delivery.end)
        self._observer.sent(self.now, rank, receiver, message, delivery.num_bytes, uplink)
        if self._machines.pays_for_messages:
            self._machines.handle_message(rank, delivery.num_bytes)
        if delivery.is_dropped:
            self._lose(delivery, "dropped")
            # Every message has its own serial, even one that never arrives.
            self._agenda.serial += 1
        else:
            # Open until it arrives or is found to be lost: it may carry mass.
            self._num_open += 1
            if message.payload:  # forecasts and the like carry nothing that was learned
                self._machines.work[rank].useful.send(self.now, delivery.end)
            at, item = self._network.arrival(delivery)
            self._agenda.push(at, receiver, item)

    def _receive(self, rank: Rank, first_byte: FirstByte) -> None:
        delivery, at = first_byte.delivery, first_byte.delivery.last
        # A message that is already lost does not use the downlink.
        if self._membership.loss(delivery, self.now) is None:
            at = self._network.receive(self.now, self._records[rank], delivery)
        self._agenda.push(at, rank, delivery)

    def _deliver(self, rank: Rank, delivery: Delivery) -> None:
        self._num_open -= 1
        # Decided on arrival: the receiver may have crashed, or returned, in the meantime.
        if (reason := self._membership.loss(delivery, self.now)) is not None:
            self._lose(delivery, reason)
            return
        sender, message = delivery.sender, delivery.message
        age = staleness(self.states[rank].round, message.round)
        if self._machines.pays_for_messages:
            self._machines.handle_message(rank, delivery.num_bytes)
        self._observer.received(self.now, rank, sender, message, age)
        self._handle(rank, Received(sender, message))

    def _lose(self, delivery: Delivery, reason: str) -> None:
        sender, receiver = delivery.sender, delivery.receiver
        self._observer.lost(self.now, receiver, sender, delivery.message, reason)

    # Timers and the end.

    def _set_timer(self, rank: Rank, effect: SetTimer) -> None:
        # Serials are never used twice, so that an earlier setting of this name does not fire.
        serial = self._records[rank].alarms[effect.name] = self._agenda.serial
        if effect.at < math.inf:
            self._agenda.push(max(self.now, effect.at), rank, Alarm(effect.name, serial))
        else:
            self._agenda.serial += 1

    def _fire(self, rank: Rank, alarm: Alarm) -> None:
        if self._records[rank].alarms.get(alarm.name) == alarm.serial:
            self._handle(rank, TimerFired(alarm.name))

    def _finish(self, rank: Rank, effect: Finish) -> None:
        # An algorithm may say so again, for example whenever a failed platform rests.
        record = self._records[rank]
        if not record.has_finished:
            record.has_finished = True
            self._num_open -= 1
            self._observer.changed(self.now, rank, "finished")

    # Faults.

    def _crash(self, rank: Rank, fault: Crash) -> None:
        if not self._membership.is_online[rank]:
            return
        self._membership.crash(rank, self.now)
        self._stop(rank, has_crashed=True)
        # Others do not know yet: a crash looks like a slow worker until it is detected.
        self._agenda.push(self.now + self._faults.detection_time, -1, Detection())

    def _stop(self, rank: Rank, *, has_crashed: bool) -> None:
        # A worker that is not there keeps no run open. Its messages in flight still do.
        record = self._records[rank]
        self._num_open -= (not record.has_finished) + (record.training is not None)
        self._machines.stop(rank, self.now)
        self._records[rank] = WorkerRecord()
        forget_gone(self._agenda, rank, self.now, has_crashed=has_crashed)
        self._observer.changed(self.now, rank, "crashed")

    def _leave(self, rank: Rank, fault: Leave) -> None:
        if not self._membership.is_online[rank]:
            return
        # Nothing that it has learned is lost: its algorithm sends what it learns in the end.
        if self._records[rank].training is not None:
            self._records[rank].leaves = True
        else:
            self._leave_now(rank)

    def _leave_now(self, rank: Rank) -> None:
        notices = list(self._membership.leave(rank, self.now))
        self._stop(rank, has_crashed=False)
        self._tell(notices)
        # Whom a partition kept from hearing it notices its silence.
        self._agenda.push(self.now + self._faults.detection_time, -1, Detection())

    def _be_absent(self, rank: Rank, absence: Absence) -> None:
        self._observer.changed(self.now, rank, "crashed")

    def _recover(self, rank: Rank, fault: Recover | Arrival) -> None:
        self._num_recoveries -= 1
        # Scripts may overlap: a worker that is back already does not return once more.
        if self._membership.is_online[rank]:
            return
        self._num_open += 1
        # The first one that comes to an empty run begins it, and has nobody to catch up with.
        has_rejoined = isinstance(fault, Recover) or self._membership.has_begun
        self._machines.restart(rank, self.now)
        self.states[rank] = self._new_state(rank)
        self._observer.changed(self.now, rank, "recovered")
        notices = list(self._membership.recover(rank, self.now))
        # Before any message that is due now, the worker learns who is lost, and then starts.
        for receiver, event in notices:
            if receiver == rank:
                self._handle(rank, event)
        self._start(rank, Start(has_rejoined))
        self._tell(notice for notice in notices if notice[0] != rank)

    def _detect(self, rank: Rank, detection: Detection) -> None:
        self._tell(self._membership.changes(self.now, self._faults.detection_time))

    def _tell(self, notices: Iterable[Notice]) -> None:
        for rank, event in notices:
            self._agenda.push(self.now, rank, event)


# Not bound methods, which would put each simulator, and its models, into a reference cycle: the
# simulators of a study piled up until memory was full. Subclasses cannot override these.
_RESOLVE: dict[type, Callable[[Simulator[Any], Rank, Any], None]] = {
    Start: Simulator._start,
    InTraining: Simulator._finish_training,
    Evaluating: Simulator._finish_evaluation,
    FirstByte: Simulator._receive,
    Delivery: Simulator._deliver,
    Alarm: Simulator._fire,
    Crash: Simulator._crash,
    Recover: Simulator._recover,
    Arrival: Simulator._recover,
    Leave: Simulator._leave,
    Absence: Simulator._be_absent,
    Detection: Simulator._detect,
}
_CARRY_OUT: dict[type, Callable[[Simulator[Any], Rank, Any], None]] = {
    Train: Simulator._train,
    Send: Simulator._send,
    SetTimer: Simulator._set_timer,
    Evaluate: Simulator._evaluate,
    Predict: Simulator._predict,
    Assign: Simulator._assign,
    Finish: Simulator._finish,
    Note: lambda sim, rank, note: sim._observer.noted(sim.now, rank, note),
}
