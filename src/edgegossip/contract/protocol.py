"""The contract between an algorithm and its driver.

An algorithm never touches a socket, a clock, a thread or a data set. A driver reports an
*event*, and the algorithm answers with *effects*. `edgegossip.sim` carries effects out in
virtual time, `edgegossip.net` on real machines.

The vocabulary is closed: a word is added only when an algorithm cannot be written without it.
`docs/contract-design.md` gives the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias, TypeVar

from torch import Tensor

Rank: TypeAlias = int
Seconds: TypeAlias = float
Span: TypeAlias = tuple[Seconds, Seconds]
"""Start and end of an interval."""
Payload: TypeAlias = Mapping[str, Tensor]
"""Named tensors, as in a state dict; never written to once sent."""
PARAMS, COMMIT = "params", "commit"
"""Kinds of messages that logs and reports count: parameters of a round, updates to a server."""


@dataclass(slots=True, eq=False)
class Message:
    """A message on a link.

    Each number adds about 25 bytes to the header, and each tensor about 60 bytes.

    Attributes:
        kind: Purpose of the message, in the algorithm's own words; `PARAMS` and `COMMIT` are
            counted.
        round: The sender's round at the time of sending, or another count that the algorithm
            keeps.
        payload: Named tensors; may be empty.
        numbers: Named numbers, `int` or `float`; may be empty.
    """

    kind: str
    round: int
    payload: Payload = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Steps:
    """SGD steps of one batch each; when a pass over the data ends, another begins.

    Attributes:
        num_steps: Number of steps, at least 1.
        after: Steps of the same round that were requested before, at least 0. A wrapper that
            reduces steps may reduce both requests together.

    Raises:
        ValueError: If a number is too small.
    """

    num_steps: int
    after: int = 0

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        if self.after < 0:
            raise ValueError(f"after must be at least 0, got {self.after}")

    def scaled(self, ratio: float) -> int:
        """The number of these steps if the round's are multiplied by `ratio`; it may be 0.

        A round that asks in two parts gets as many as one that asks at once, at least one.

        >>> [Steps(3).scaled(0.5), Steps(1, after=3).scaled(0.5), Steps(4).scaled(0.5)]
        [2, 0, 2]
        """

        def due(asked: int) -> int:
            return max(1, round(ratio * asked)) if asked else 0

        return due(self.after + self.num_steps) - due(self.after)


@dataclass(frozen=True, slots=True)
class Epochs:
    """A pass over the worker's data, or a share of one.

    Attributes:
        share: Share of the pass, in (0, 1], rounded up to whole batches.

    Raises:
        ValueError: If `share` is out of range.
    """

    share: float = 1.0

    def __post_init__(self) -> None:
        _require_ratio("share", self.share)


@dataclass(frozen=True, slots=True)
class Units:
    """Units of data that all workers can read, each a few hundred samples; see `Shared`.

    Every epoch divides the samples into units anew, for all workers alike. A request is a pass
    over the samples of its units.

    Attributes:
        epoch: The epoch, from 0.
        indices: Units to train on, at least one, in 0 .. `Started.num_units` - 1.

    Raises:
        ValueError: If a number is out of range, or there is no unit.
    """

    epoch: int
    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.epoch < 0 or not self.indices or min(self.indices) < 0:
            raise ValueError(
                "epoch and indices must be at least 0, and indices not empty, got epoch "
                f"{self.epoch} and {self.indices}"
            )


def _require_ratio(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value}")


def _require_factor(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a parameter vector: trained entries first, then running statistics.

    Attributes:
        num_trained: Number of trained entries, which come first; the others are running
            statistics of normalization layers. Statistics may be averaged, but not
            extrapolated: a variance could become negative.
    """

    num_trained: int

    def with_statistics(self, params: Tensor, measured: Tensor) -> Tensor:
        """Return `params` with the running statistics of `measured`, both [num_params].

        >>> import torch
        >>> Layout(num_trained=2).with_statistics(torch.zeros(3), torch.ones(3))
        tensor([0., 0., 1.])
        """
        if self.num_trained == params.numel():
            return params
        whole = params.clone()
        whole[self.num_trained :] = measured[self.num_trained :]
        return whole


Work: TypeAlias = Steps | Epochs | Units


# Events happen to a worker. Drivers make one object per event, and nothing changes it. Events
# are not `frozen`, because frozen dataclasses take four times as long to build.


@dataclass(slots=True)
class Started:
    """The worker has its initial parameters and may act.

    Attributes:
        has_rejoined: Whether the worker was lost and returns with a new state.
        num_samples: Training samples of the worker; 0 if its role has no data.
        epoch_cost: Cost of a pass over these samples, including their selection; see
            `Trained.cost`.
        layout: Layout of parameter vectors; None if all entries are trained.
        life: Random number of the worker's life on a network, where its clock may restart; 0 in
            the simulator, whose clock never does.
        num_units: Number of units in an epoch of data that all workers can read (`Units`); 0 if
            each worker has samples of its own.
    """

    has_rejoined: bool = False
    num_samples: int = 0
    epoch_cost: float = 0.0
    layout: Layout | None = None
    life: int = 0
    num_units: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Trained:
    """The work requested by `Train` is done.

    Attributes:
        params: Parameters after training, [num_params].
        before: The snapshot that training started from, [num_params].
        num_samples: Samples processed.
        num_steps: Number of SGD steps; 0 if training was skipped.
        seconds: Duration on the clock of `now`.
        loss: Mean training loss over the steps.
        outputs: Tensors that layers of a split model produce for other workers; empty for a
            whole model.
        cost: Cost in training samples: `num_samples` plus the cost of choosing the samples.
        metrics: The trainer's other measurements, by name.
        moments: Moments of the optimizer after training, if `Train.moments` is not None:
            "first" and "second", each with an entry for each parameter that has such a moment,
            after correction of its bias, if the optimizer corrects it.
            A trainer without moments reports none.
        has_gone_back: Whether the initial parameters were unsound, probably because of other
            workers' messages. If so, nothing was trained: `params` and `before` are the last
            sound parameters. State derived from later parameters (momentum, errors) should be
            dropped.
    """

    params: Tensor
    before: Tensor
    num_samples: int
    num_steps: int
    seconds: Seconds
    loss: float
    outputs: Payload = field(default_factory=dict)
    cost: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    moments: Payload = field(default_factory=dict)
    has_gone_back: bool = False

    @classmethod
    def skipped(cls, params: Tensor) -> Trained:
        """Answer a `Train` that was skipped, with unchanged `params`."""
        return cls(
            params=params, before=params, num_samples=0, num_steps=0, seconds=0.0, loss=0.0
        )

    @property
    def is_skipped(self) -> bool:
        """Whether training was skipped."""
        return self.num_steps == 0

    @property
    def delta(self) -> Tensor:
        """Parameter change during training, [num_params]."""
        return self.params - self.before


@dataclass(slots=True)
class Evaluated:
    """The evaluation requested by `Evaluate` is done: mean `loss`, and the task's `metrics`."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Predicted:
    """The forecast requested by `Predict`.

    Attributes:
        throughput: Work per second, in training samples.
        relative_error: Expected error: one standard deviation, divided by `throughput`.
    """

    throughput: float
    relative_error: float = 0.0


@dataclass(slots=True)
class Assigned:
    """The worker now has the data requested by `Assign`; the fields are as in `Started`."""

    num_samples: int
    epoch_cost: float


@dataclass(slots=True, eq=False)
class Received:
    """`message` arrived from `sender`."""

    sender: Rank
    message: Message


@dataclass(slots=True)
class TimerFired:
    """The timer `name` is due."""

    name: str


@dataclass(slots=True)
class WorkerLost:
    """Worker `rank` is lost or cannot be reached; it may come back.

    If the worker `has_lied`, its unused messages must be dropped.
    """

    rank: Rank
    has_lied: bool = False


@dataclass(slots=True)
class WorkerJoined:
    """Worker `rank` is new or back; unless it `has_restarted`, it was only unreachable."""

    rank: Rank
    has_restarted: bool = False


Event: TypeAlias = (
    Started
    | Trained
    | Evaluated
    | Predicted
    | Assigned
    | Received
    | TimerFired
    | WorkerLost
    | WorkerJoined
)


# Effects: requests from a worker to its driver.


@dataclass(slots=True, eq=False)
class Train:
    """Train on local data from `params`, one request at a time; answered by `Trained`.

    `work` is the amount of training; the other fields describe the data and the method.

    Attributes:
        params: A snapshot, [num_params], which never changes, even if the state changes during
            the work.
        work: `Steps`, `Epochs` or `Units`.
        keep_ratio: Share of the worker's data that a pass visits, in (0, 1]; the trainer
            chooses the samples when the pass begins. Such a pass costs `keep_ratio` times a
            pass over all data.
        begins_pass: Whether `Epochs` begin a new pass or continue the current one. `Steps`
            always continue, and `Units` always begin one.
        batch_ratio: Size of each batch relative to the trainer's own, above 0; the result is
            rounded to whole samples, at least one.
        rate_ratio: Learning rate relative to the trainer's schedule, above 0.
        momentum: Momentum of the trainer's optimizer for this work, in [0, 1); None keeps the
            optimizer's own.
        inputs: Tensors that layers of a split model train on (activations, gradients); empty
            for a trainer that draws its own batches.
        moments: Moments of the trainer's optimizer, named as in `Trained.moments`, which
            replace its own. None leaves them alone; an empty mapping does, too, but asks for a
            report.

    Raises:
        ValueError: If a number is out of range.
    """

    params: Tensor
    work: Work
    _: KW_ONLY
    keep_ratio: float = 1.0
    begins_pass: bool = True
    batch_ratio: float = 1.0
    rate_ratio: float = 1.0
    momentum: float | None = None
    inputs: Payload = field(default_factory=dict)
    moments: Payload | None = None

    def __post_init__(self) -> None:
        momentum = self.momentum
        if not (
            0 < self.keep_ratio <= 1
            and 0 < self.batch_ratio < math.inf
            and 0 < self.rate_ratio < math.inf
            and (momentum is None or 0 <= momentum < 1)
        ):
            self._reject()  # separate, because every few events build a `Train`

    def _reject(self) -> None:
        _require_ratio("keep_ratio", self.keep_ratio)
        _require_factor("batch_ratio", self.batch_ratio)
        _require_factor("rate_ratio", self.rate_ratio)
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")


@dataclass(slots=True, eq=False)
class Evaluate:
    """Evaluate `params` ([num_params]) on validation data; answered by `Evaluated`.

    `params` is a snapshot, as in `Train`. The test data of reports is never used.
    """

    params: Tensor


@dataclass(slots=True)
class Predict:
    """Forecast this worker's own throughput for the next `Train`; answered by `Predicted`."""


@dataclass(slots=True)
class Assign:
    """Train on the data of the workers `ranks` from now on; answered by `Assigned`.

    If the worker's own rank is not among `ranks`, its own data is not used.
    """

    ranks: tuple[Rank, ...]


@dataclass(slots=True, eq=False)
class Send:
    """Deliver `message` to `receiver`; the message may be late or lost, never duplicated."""

    receiver: Rank
    message: Message


@dataclass(slots=True)
class SetTimer:
    """Set the timer `name` to fire at `at`, and not at any time set before; inf cancels it."""

    name: str
    at: Seconds


@dataclass(slots=True)
class Finish:
    """The worker has no work left.

    The worker still answers events, because mass may be in flight. A run ends when all online
    workers have finished and no work or message is in flight; timers do not keep it open.

    Attributes:
        may_resume: Whether it trains again if it gets work before the others have finished, as
            a spare does.
    """

    may_resume: bool = False


@dataclass(slots=True)
class Note:
    """Record numbers for those who inspect the run; no driver acts on them.

    A note takes no time and has no answer. A network keeps about ten notes per second from each
    worker.

    Attributes:
        kind: Subject of the numbers, in the algorithm's own words ("window").
        numbers: Numbers by name, at most `MAX_NOTED`.

    Raises:
        ValueError: If there are more than `MAX_NOTED` numbers, or a name is longer than 40
            characters.
    """

    kind: str
    numbers: Mapping[str, float]

    def __post_init__(self) -> None:
        longest = max([self.kind, *self.numbers], key=len)
        if len(self.numbers) > MAX_NOTED or len(longest) > _LONGEST_NAME:
            raise ValueError(
                f"a note has at most {MAX_NOTED} numbers and names of at most {_LONGEST_NAME} "
                f"characters, got {len(self.numbers)} and {longest[:60]!r}; make two of it"
            )


MAX_NOTED = 32
_LONGEST_NAME = 40

Effect: TypeAlias = Train | Evaluate | Predict | Assign | Send | SetTimer | Finish | Note


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a rank in a run.

    If the ranks of a role share one parameter vector, drivers average each slice over the ranks
    that hold it and join the slices. `Algorithm.init` gets the whole vector.

    Attributes:
        name: Name such as "worker", "server" or "stage-0"; it also selects the model that a
            driver builds.
        has_data: Whether the rank gets a shard of the training data.
        is_evaluated: Whether the rank's parameters count in the reported averaged model while
            its state does not exclude them. Ranks with the same role name are averaged; if
            roles hold parts of a model, the task joins the averaged parts.
        evaluates: Whether the rank may request `Evaluate`. With `Local` data, a rank that has
            no training data reads validation samples only in this case.
        slice_index: Index, from 0, of the rank's estimate among the slices of the role's
            parameters.
        num_slices: Number of the role's contiguous slices; their sizes differ by at most one
            entry.
    """

    name: str
    has_data: bool = True
    is_evaluated: bool = True
    evaluates: bool = False
    slice_index: int = 0
    num_slices: int = 1

    def stretch(self, num_params: int) -> slice:
        """Return the slice of a vector [num_params] that this rank holds.

        >>> [Role("server", slice_index=i, num_slices=3).stretch(8) for i in range(3)]
        [slice(0, 2, None), slice(2, 5, None), slice(5, 8, None)]
        """
        first, end = self.slice_index, self.slice_index + 1
        return slice(first * num_params // self.num_slices, end * num_params // self.num_slices)

    def num_held(self, num_params: int) -> int:
        """Count the entries of this rank's slice of a vector [num_params]."""
        stretch = self.stretch(num_params)
        return int(stretch.stop - stretch.start)


WORKER = Role("worker")


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """State of a worker with the fields that every driver reads; algorithms add their own.

    A state is a dataclass. Its fields are numbers, strings, tensors, dataclasses, and lists,
    tuples and dicts of these, so that a state can be copied, saved and resumed at any event.

    Attributes:
        rank: Rank of the worker.
        params: Parameters that the next training starts from, [num_params].
        round: Completed rounds.
    """

    rank: Rank
    params: Tensor
    round: int = 0

    @property
    def estimate(self) -> Tensor:
        """The parameters to evaluate, [num_params]; push-sum divides by its weight here."""
        return self.params

    @property
    def is_evaluated(self) -> bool:
        """Whether the estimate currently counts in evaluations, if the rank's `Role` allows it.

        For example, only one of a server and its standbys counts at a time. If no rank's
        estimate counts, all of them do.
        """
        return True


State = TypeVar("State", bound=WorkerState)
