"""The best averaged model by validation, among workers that have no common memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm, Wrapper, WrapperState
from edgegossip.contract.errors import UsageError, unknown_name
from edgegossip.contract.metrics import MetricSpec
from edgegossip.contract.protocol import (
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.schema import Limits, MessageSpec, TensorSpec
from edgegossip.data.local import Local
from edgegossip.models.flat import FlatModel
from edgegossip.runs.best import LOSS, BestModel, KeepBest
from edgegossip.runs.experiment import Experiment

_MODEL = "best model"
"""Kind of the message with a worker's model, and name of the timer that repeats it."""
_ASK = "best ask"
"""Kind of the message that asks for a worker's model."""
_RECORD = "best record"
"""Kind of the message with the judge's record."""
_REPEAT: Seconds = 10.0
"""Seconds until a waiting worker repeats its model; they double each time."""
_LONGEST: Seconds = 60.0
"""Wait for a record, however short the run was."""
_LATE = 10
"""Intervals between checks after which a judge asks for all models again."""
_AHEAD = 3
"""Models of one worker that the judge keeps."""
_MOST_CHECKS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The result of all evaluations so far.

    Attributes:
        check: Number of the last evaluation, from 1; 0 before the first.
        best_check: Number of the best evaluation; 0 if there is none.
        best_time: Its time.
        best_round: Rounds after which workers sent the models in its mean.
        value: Its value; 0 if there is none.
    """

    check: int = 0
    best_check: int = 0
    best_time: Seconds = 0.0
    best_round: int = 0
    value: float = 0.0

    def has_better(self, metric: MetricSpec, other: Record) -> bool:
        """Whether the best evaluation is better than the other's, or equal and earlier."""
        if not (self.best_check and other.best_check):
            return self.best_check > other.best_check
        if self.value != other.value:
            return metric.is_better(self.value, other.value)
        return self.best_check < other.best_check

    def has_same_best(self, other: Record) -> bool:
        """Whether both name the same best evaluation."""
        return (self.best_check, self.value) == (other.best_check, other.value)

    def up_to(self, check: int) -> Record:
        """This record, if the last evaluation is at least that of `check`."""
        return replace(self, check=max(self.check, check))


@dataclass(slots=True, kw_only=True)
class BestState(WrapperState):
    """State of one worker.

    Attributes:
        record: The evaluations so far.
        best: Parameters of the best mean, [num_params]; empty if they are unknown.
        sent: Number of the last check for which this worker sent its model or, in a run that
            asks for models, asked the others.
        sent_round: Round in which it did.
        own: Its model of that check.
        models: The judge's models, by check and rank; empty tensors for models that do not
            count.
        mean: The mean that is being evaluated, with its check and round; None if there is none.
        questions: For each unanswered `Evaluate`, whether this wrapper asked.
        lost: Workers that cannot be reached, as keys.
        held: The training, or the end, that waits for a record.
        waits_until: Time until which it waits.
        repeats_after: Seconds until a waiting worker repeats its model.
        skipped: Last check whose record this worker no longer waits for.
        is_over: Whether the run has ended because it no longer improved.
    """

    record: Record = Record()
    best: Tensor
    sent: int = 0
    sent_round: int = 0
    own: Tensor
    models: dict[int, dict[Rank, Tensor]] = field(default_factory=dict)
    mean: tuple[Tensor, int, int] | None = None
    questions: list[bool] = field(default_factory=list)
    lost: dict[Rank, None] = field(default_factory=dict)
    held: Train | Finish | None = None
    waits_until: Seconds = math.inf
    repeats_after: Seconds = _REPEAT
    skipped: int = 0
    is_over: bool = False


@dataclass(frozen=True, kw_only=True)
class BestByValidation(Wrapper[BestState]):
    """Keep the best average of the workers' models, and end a run that no longer improves.

    The *judge* is the lowest rank in reach whose role is evaluated. In each *check*, every
    `keep.rounds` rounds, the judge averages the models of all evaluated workers in reach, and
    measures the mean with `Evaluate`, on validation data. It sends the record of all checks to
    all workers, and the mean if it is the best so far, so that another worker can take over, or
    return, and know the best model. Of equal values, the earliest counts.

    **Synchronous workers** send their models without being asked, and train on. A worker that
    has completed the rounds of check c + 1 needs the record of check c; if it has not arrived,
    the worker waits for it before it trains again. The record of check c decides whether the
    run ends there, so all workers end in the same round. A worker that ends by itself first
    waits for the record of its last check.

    **Other workers**, and servers, never wait: the judge asks for the models when it has
    completed `keep.rounds` rounds itself and no evaluation is under way. All end as soon as
    they get the record.

    No wait is longer than a minute plus the duration of the run so far. A worker whose model is
    missing because it is lost, or has skipped rounds, is not in that mean.

    Args:
        inner: The algorithm to run; its workers hold whole models.
        num_workers: Number of workers in the run.
        keep: The rounds between two checks, and when the run ends.
        metric: Metric by which models are chosen.
    """

    num_workers: int
    keep: KeepBest
    metric: MetricSpec

    def counts_after_end(self, message: Message) -> bool:
        """Whether it is about checks, which may still find a better model."""
        return message.kind in (_MODEL, _ASK, _RECORD) or self.inner.counts_after_end(message)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        model = TensorSpec(params.dtype, (None,), max_numel=params.numel())
        check = range(_MOST_CHECKS)
        numbers: dict[str, Limits] = {
            "check": check,
            "best_check": check,
            "best_time": (0.0, math.inf),
            "best_round": range(_MOST_CHECKS),
            "value": (-math.inf, math.inf),
        }
        return {
            **self.inner.schema(params),
            _MODEL: MessageSpec({"params": model}, numbers={"check": check}),
            _ASK: MessageSpec(numbers={"check": check}),
            _RECORD: MessageSpec({"params": model}, numbers=numbers),
        }

    def init(self, rank: Rank, params: Tensor) -> BestState:
        inner, nothing = self.inner.init(rank, params), params[:0]
        return BestState(
            rank=rank,
            params=inner.params,
            inner=inner,
            best=nothing,
            own=nothing,
        )

    def handle(self, state: BestState, event: Event, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Received(sender, Message(kind=kind) as message) if kind == _MODEL:
                effects = self._take(state, sender, message)
            case Received(sender, Message(kind=kind) as message) if kind == _ASK:
                effects = self._answer(state, sender, message)
            case Received(sender, Message(kind=kind) as message) if kind == _RECORD:
                effects = self._learn(state, sender, message)
            case Evaluated() if state.questions and state.questions.pop(0):
                effects = self._judge(state, event, now)
            case TimerFired(name) if name == _MODEL:
                effects = self._repeat(state, now)
            case Trained() if state.is_over:
                pass  # too late to count
            case _:
                effects = self._pass_on(state, event, now)
        state.params, state.round = state.inner.params, state.inner.round
        match event:
            case WorkerLost(rank):
                before = self._judge_of(state)
                state.lost[rank] = None
                if before == rank:
                    effects += self._submit(state)
            case WorkerJoined(rank):
                effects += self._welcome(state, rank)
        return [*effects, *self._go_on(state, now)]

    @property
    def rounds(self) -> int:
        """Rounds between two checks."""
        return self.keep.rounds or 1

    @property
    def counted(self) -> list[Rank]:
        """The ranks whose models count in the mean."""
        return [rank for rank in range(self.num_workers) if self.role(rank).is_evaluated]

    @property
    def _is_pushed(self) -> bool:
        """Whether workers send their models after equal rounds, without being asked."""
        traits = self.traits
        is_equal = traits.is_synchronous and not traits.changes_roles
        return is_equal and len(self.counted) == self.num_workers

    def _judge_of(self, state: BestState) -> Rank | None:
        """The judge, as this worker sees it; None if no evaluated worker is in reach."""
        return next((rank for rank in self.counted if rank not in state.lost), None)

    def _is_judge(self, state: BestState) -> bool:
        return self._judge_of(state) == state.rank

    def _pass_on(self, state: BestState, event: Event, now: Seconds) -> list[Effect]:
        """Let the inner algorithm handle the event, but hold its training and its end."""
        effects: list[Effect] = []
        for effect in self.inner.handle(state.inner, event, now):
            match effect:
                case Train() | Finish():
                    if not state.is_over:
                        state.held, state.waits_until = effect, math.inf
                case _:
                    if isinstance(effect, Evaluate):
                        state.questions.append(False)
                    effects.append(effect)
        return effects

    def _go_on(self, state: BestState, now: Seconds) -> list[Effect]:
        """Begin a check, measure the models of one, end the run, or release what was held."""
        effects: list[Effect] = []
        if not state.is_over and self._is_past_patience(state):
            state.is_over, state.held = True, None
            return [Finish()]
        if self._is_check_due(state):
            effects += self._begin_check(state)
        effects += self._measure(state)
        if state.held is None:
            return effects
        is_waiting = self._is_waiting(state)
        if not is_waiting or now >= state.waits_until:
            state.skipped = state.sent if is_waiting else state.skipped
            effects.append(state.held)
            state.held = None
        elif state.waits_until == math.inf:
            state.waits_until = 2 * now + _LONGEST
            state.repeats_after = _REPEAT
            effects.append(SetTimer(_MODEL, now + state.repeats_after))
        return effects

    # Checks.

    def _is_check_due(self, state: BestState) -> bool:
        if state.is_over or not self.role(state.rank).is_evaluated:
            return False
        if self._is_pushed:
            return state.round // self.rounds > state.sent
        if state.mean is not None or not self._is_judge(state):
            return False
        enough = 1 if isinstance(state.held, Finish) else self.rounds
        if state.sent > state.record.check:  # an answer is late, or lost
            enough = _LATE * self.rounds
        return state.round - state.sent_round >= enough

    def _begin_check(self, state: BestState) -> list[Effect]:
        state.own = _counted_model(state)
        state.sent_round = state.round
        if self._is_pushed:
            state.sent = state.round // self.rounds
            return self._submit(state)
        # Also for a check whose answers were lost, which was no evaluation. At most what the
        # schema allows: a liar may have named the highest number.
        state.sent = min(state.record.check + 1, _MOST_CHECKS - 1)
        state.models = {state.sent: {state.rank: state.own}}
        return self._ask(state)

    def _ask(self, state: BestState) -> list[Effect]:
        """As a judge that asks, ask for the models that have not arrived."""
        ask = Message(_ASK, state.round, {}, {"check": state.sent})
        arrived = state.models.get(state.sent, {})
        missing = [rank for rank in self.counted if rank not in arrived]
        return [Send(rank, ask) for rank in self._others(state, missing)]

    def _submit(self, state: BestState) -> list[Effect]:
        """Give the model of the last check to the judge, unless it is measured."""
        judge = self._judge_of(state)
        if state.sent <= state.record.check or judge is None:
            return []
        if judge == state.rank:
            state.models.setdefault(state.sent, {})[state.rank] = state.own
            return []
        # In a run that asks, only a judge begins checks, and the next judge begins its own.
        return [Send(judge, self._model(state, state.sent))] if self._is_pushed else []

    def _model(self, state: BestState, check: int) -> Message:
        return Message(_MODEL, state.round, {"params": state.own}, {"check": check})

    def _answer(self, state: BestState, sender: Rank, message: Message) -> list[Effect]:
        """Send this worker's model of now to the judge that asks."""
        if self._is_pushed or not self.role(state.rank).is_evaluated:
            return []
        state.own = _counted_model(state)
        return [Send(sender, self._model(state, int(message.numbers["check"])))]

    def _take(self, state: BestState, sender: Rank, message: Message) -> list[Effect]:
        params, check = message.payload["params"], int(message.numbers["check"])
        if len(params) not in (0, len(state.params)) or not self.role(sender).is_evaluated:
            return []
        known = state.models.setdefault(check, {})
        is_repeated = sender in known or check <= state.record.check
        known.setdefault(sender, params)
        # Nobody is further ahead of the record, and a liar must not fill the memory.
        for early in sorted(c for c, each in state.models.items() if sender in each)[:-_AHEAD]:
            del state.models[early][sender]
        # Perhaps the record has not arrived there.
        return self._tell_all(state, sender) if is_repeated else []

    def _measure(self, state: BestState) -> list[Effect]:
        """As the judge, begin to evaluate the next mean whose models have all arrived."""
        state.models = {
            c: each for c, each in state.models.items() if each and c > state.record.check
        }
        # The run has ended with the last record; a later mean would not be one of its models.
        if state.is_over or state.mean is not None or not self._is_judge(state):
            return []
        for check in sorted(state.models):
            if not self._is_complete(state, check):
                continue
            models = [each for _, each in sorted(state.models[check].items()) if len(each)]
            if not models:
                continue
            round = check * self.rounds if self._is_pushed else state.sent_round
            state.mean = (_average(models), check, round)
            state.questions.append(True)
            return [Evaluate(state.mean[0])]
        return []

    def _is_complete(self, state: BestState, check: int) -> bool:
        """Whether no worker in reach will still send its model of this check."""
        # A worker that has sent a later one has skipped rounds, or was away.
        arrived = {rank for c, each in state.models.items() if c >= check for rank in each}
        return all(rank in arrived or rank in state.lost for rank in self.counted)

    def _judge(self, state: BestState, event: Evaluated, now: Seconds) -> list[Effect]:
        """Add an evaluation to the record, and tell all workers."""
        assert state.mean is not None
        mean, check, round = state.mean
        state.mean = None
        if check <= state.record.check:
            return []  # another judge was sooner
        values = {**event.metrics, LOSS.name: event.loss}
        if self.metric.name not in values:
            raise UsageError(unknown_name("metric", self.metric.name, values))
        before, value = state.record.up_to(check), values[self.metric.name]
        found = Record(
            check=check, best_check=check, best_time=now, best_round=round, value=value
        )
        # Others would reject a record that is not finite, and mute its sender.
        is_best = math.isfinite(value) and found.has_better(self.metric, before)
        state.record, state.best = (found, mean) if is_best else (before, state.best)
        params = mean if is_best else mean[:0]
        return self._tell(state, range(self.num_workers), state.record, params)

    # The record.

    def _tell(
        self, state: BestState, ranks: Iterable[Rank], record: Record, params: Tensor
    ) -> list[Effect]:
        message = Message(_RECORD, state.round, {"params": params}, asdict(record))
        return [Send(rank, message) for rank in self._others(state, ranks)]

    def _tell_all(self, state: BestState, rank: Rank) -> list[Effect]:
        """Tell another worker what this one knows."""
        return self._tell(state, [rank], state.record, state.best)

    def _learn(self, state: BestState, sender: Rank, message: Message) -> list[Effect]:
        """Join another worker's record with this one's."""
        params = message.payload["params"]
        if len(params) not in (0, len(state.params)):
            return []
        own, other = state.record, Record(**message.numbers)  # type: ignore[arg-type]
        if other.has_better(self.metric, own):
            state.record, state.best = other.up_to(own.check), params
        else:
            state.record = own.up_to(other.check)
        is_same = state.record.has_same_best(other)
        if is_same and other.best_check and not len(state.best):
            state.best = params
            # If the message with the model was lost, an empty record asks for it.
            return [] if len(params) else self._tell(state, [sender], Record(), params)
        if not is_same and len(state.best):  # the sender has returned, or asks
            return self._tell_all(state, sender)
        return []

    def _welcome(self, state: BestState, rank: Rank) -> list[Effect]:
        """Tell a worker that is new or back what it has missed."""
        rest = [each for each in range(self.num_workers) if each not in state.lost]
        state.lost.pop(rank, None)
        is_first = state.rank == min(each for each in rest if each != rank)
        told = self._tell_all(state, rank) if is_first and state.record.check else []
        return [*told, *(self._submit(state) if self._judge_of(state) == rank else [])]

    def _others(self, state: BestState, ranks: Iterable[Rank]) -> Iterator[Rank]:
        return (rank for rank in ranks if rank != state.rank and rank not in state.lost)

    # Waiting and ending.

    def _is_past_patience(self, state: BestState) -> bool:
        record = state.record
        if not self.keep.is_over(record.check - record.best_check):
            return False
        # Workers with equal rounds end where the next check is due, and so in one round.
        next_round = (record.check + 1) * self.rounds
        return not self._is_pushed or state.round >= next_round

    def _is_waiting(self, state: BestState) -> bool:
        """Whether a record is missing that must be known first."""
        if not self.role(state.rank).is_evaluated:
            return False
        if isinstance(state.held, Finish):  # the last model may be the best one
            needed = state.sent if self._is_pushed or self._is_judge(state) else 0
        else:
            needed = state.sent - 1 if self._is_pushed else 0
        return max(state.record.check, state.skipped) < needed

    def _repeat(self, state: BestState, now: Seconds) -> list[Effect]:
        """Repeat the model or the question: it, or the answer, may have been lost."""
        if state.held is None:
            return []
        state.repeats_after *= 2
        at = max(now, min(now + state.repeats_after, state.waits_until))
        again = [] if now >= state.waits_until else [SetTimer(_MODEL, at)]
        asks = not self._is_pushed and state.sent > state.record.check
        return [*(self._ask(state) if asks else self._submit(state)), *again]


def _counted_model(state: BestState) -> Tensor:
    """The worker's model of now, [num_params]; empty if it does not count."""
    # A copy: the inner state may still change.
    estimate: Tensor = state.inner.estimate.clone()
    return estimate if state.inner.is_evaluated else estimate[:0]


def _average(models: list[Tensor]) -> Tensor:
    """The mean of models; equal ones are not averaged, which might round differently."""
    if all(torch.equal(models[0], each) for each in models[1:]):
        return models[0]
    return torch.stack(models).mean(0)


def best_state(state: Any) -> BestState | None:  # noqa: ANN401 - of any algorithm
    """The state of `BestByValidation` within a worker's state; None without it."""
    while state is not None and not isinstance(state, BestState):
        state = getattr(state, "inner", None)
    return state


def best_model(state: BestState, metric: MetricSpec, spare: FlatModel) -> BestModel | None:
    """The best model that a worker knows; None if it knows none.

    Args:
        state: State of the worker.
        metric: Metric by which it was chosen.
        spare: A copy of the model, which is changed.
    """
    if not len(state.best):
        return None
    with torch.no_grad():
        spare.load(state.best)
    named = spare.module.state_dict()
    return BestModel(
        params={name: tensor.cpu().clone() for name, tensor in named.items()},
        time=state.record.best_time,
        round=state.record.best_round,
        metric=metric,
        validation_value=state.record.value,
        metrics={},
    )


def with_best(
    algorithm: Algorithm[Any],
    num_workers: int,
    keep: KeepBest | None,
    metrics: Sequence[MetricSpec] = (),
) -> Algorithm[Any]:
    """Wrap `algorithm` in `BestByValidation`; without `keep`, return it unchanged.

    Args:
        algorithm: Algorithm of the workers.
        num_workers: Number of workers in the run.
        keep: The setting.
        metrics: Metrics of the task, the chosen one first.

    Raises:
        ValueError: If its workers hold parts or slices of a model, which no worker can measure.
    """
    if keep is None:
        return algorithm
    roles = [algorithm.role(rank) for rank in range(num_workers)]
    held = {(role.name, role.num_slices) for role in roles if role.is_evaluated}
    if len(held) != 1 or next(iter(held))[1] > 1:
        raise ValueError(
            "keep measures whole models, and these workers hold parts; leave it out on real "
            "machines, or simulate the run"
        )
    return BestByValidation(
        inner=algorithm, num_workers=num_workers, keep=keep, metric=keep.find(metrics)
    )


def with_best_of(experiment: Experiment) -> Algorithm[Any]:
    """The algorithm of an experiment's workers on real machines, with its `keep`.

    Raises:
        ValueError: If no worker could measure the averaged model: the data is `Local`, or
            workers hold parts of a model.
    """
    algorithm, kept, task = experiment.algorithm, experiment.kept, experiment.task
    if kept is not None and isinstance(task.dataset, Local):
        raise ValueError(
            "keep needs a worker that can measure the averaged model for all, and Local data "
            "stays with each worker; leave keep out on real machines"
        )
    if kept is not None and kept.rounds is None and algorithm.traits.local_steps:
        # Equal on all workers, whose shards may differ by a sample.
        samples = len(experiment.data_ranks) * task.batch_size * algorithm.traits.local_steps
        kept = replace(kept, rounds=max(1, round(len(task.dataset.train) / samples)))
    return with_best(algorithm, experiment.num_workers, kept, task.specs)
