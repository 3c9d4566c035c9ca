"""The contract between an algorithm and whatever runs it.

An algorithm never touches a socket, a clock, a thread or a data set. It is told what
happened (an *event*) and answers with what shall be done (*effects*). `edgegossip.sim`
carries effects out in virtual time, `edgegossip.net` on real machines.

The vocabulary is closed: a word is added only when an algorithm cannot be said without it.
`docs/contract.md` says four very different systems in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from torch import Tensor

Rank: TypeAlias = int
Seconds: TypeAlias = float
Span: TypeAlias = tuple[Seconds, Seconds]
"""When something began and ended."""
Payload: TypeAlias = Mapping[str, Tensor]
"""Named tensors, as in a state dict. Never written to once sent."""


@dataclass(slots=True, eq=False)
class Message:
    """What travels on a link.

    Attributes:
        kind: What the message is for, in the algorithm's own words ("params", "commit").
        round: The sender's round when it was sent, or whatever the algorithm counts.
        payload: Named tensors; may be empty.
    """

    kind: str
    round: int
    payload: Payload = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Steps:
    """Some SGD steps of one batch each; where a pass over the data ends, another begins.

    Attributes:
        num_steps: At least 1.
        keep_ratio: Share of the own data that a pass visits, in (0, 1]; the trainer chooses
            which when a pass begins.
    """

    num_steps: int
    keep_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        _require_ratio("keep_ratio", self.keep_ratio)


@dataclass(frozen=True, slots=True)
class Epochs:
    """A pass over the own data, or a share of one.

    Attributes:
        share: Of the pass, in (0, 1], rounded up to batches.
        keep_ratio: Share of the own data that the pass visits, in (0, 1]; the trainer chooses
            which. A pass costs `keep_ratio` times what one over all data costs.
        goes_on: Go on with the present pass instead of beginning a new one.
    """

    share: float = 1.0
    keep_ratio: float = 1.0
    goes_on: bool = False

    def __post_init__(self) -> None:
        _require_ratio("share", self.share)
        _require_ratio("keep_ratio", self.keep_ratio)


def _require_ratio(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value}")


Work: TypeAlias = Steps | Epochs


# Events: what happened to a worker. Drivers make one object per event and nobody changes it;
# they are not `frozen` because that makes them four times slower to build.


@dataclass(slots=True)
class Started:
    """The worker has its initial parameters and may act.

    Attributes:
        has_rejoined: It was lost and comes back with nothing but them.
        num_samples: Training samples that it has, 0 if its role has no data.
        epoch_cost: What a pass over them costs, choosing included; see `Trained.cost`.
    """

    has_rejoined: bool = False
    num_samples: int = 0
    epoch_cost: float = 0.0


@dataclass(slots=True, eq=False)
class Trained:
    """The work asked for by `Train` is done.

    Attributes:
        params: Parameters after training, [num_params].
        before: The snapshot that training started from, [num_params].
        num_samples: Samples processed.
        num_steps: SGD steps taken.
        seconds: How long it took, on the clock of `now`.
        loss: Mean training loss over the steps.
        outputs: What the layers of a split model give to others; empty for a whole model.
        cost: What it cost in training samples' worth of time: `num_samples`, and what was
            paid to choose them.
        num_trained: Of the entries of `params`, those that were trained, the first ones; the
            others are running statistics. None for all.
        focus: Share of the samples, in [0, 1], that were chosen for their high loss.
    """

    params: Tensor
    before: Tensor
    num_samples: int
    num_steps: int
    seconds: Seconds
    loss: float
    outputs: Payload = field(default_factory=dict)
    cost: float = 0.0
    num_trained: int | None = None
    focus: float = 0.0

    @property
    def delta(self) -> Tensor:
        """Parameters after minus before training, [num_params]."""
        return self.params - self.before


@dataclass(slots=True)
class Evaluated:
    """The evaluation asked for by `Evaluate` is done: mean `loss`, `accuracy` in [0, 1]."""

    loss: float
    accuracy: float


@dataclass(slots=True)
class Predicted:
    """The forecast asked for by `Predict`.

    Attributes:
        throughput: Training samples' worth of work per second.
        relative_error: How far off it may be: one standard deviation over `throughput`.
    """

    throughput: float
    relative_error: float = 0.0


@dataclass(slots=True)
class Assigned:
    """The worker now has the data asked for by `Assign`; sizes are as in `Started`."""

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
    """Worker `rank` is gone, or cannot be reached; it may come back."""

    rank: Rank


@dataclass(slots=True)
class WorkerJoined:
    """Worker `rank` is back, or new; unless it `has_restarted`, only the way was cut."""

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


# Effects: what a worker wants done.


@dataclass(slots=True, eq=False)
class Train:
    """Train on own data, starting from `params`; answered by `Trained`. One at a time.

    `params` ([num_params]) is a snapshot: nobody writes to it any more, whatever happens to
    the state while the work runs. `inputs` are what layers of a split model train on
    (activations, gradients); empty for one that draws its own batches.
    """

    params: Tensor
    work: Work
    inputs: Payload = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Evaluate:
    """Evaluate `params` ([num_params]) on held-out data; answered by `Evaluated`."""

    params: Tensor


@dataclass(slots=True)
class Predict:
    """Forecast this worker's own throughput for the next `Train`; answered by `Predicted`."""


@dataclass(slots=True)
class Assign:
    """Train on the data of the workers `ranks` from now on; answered by `Assigned`.

    The own rank stands among them, or the own data is no longer trained on.
    """

    ranks: tuple[Rank, ...]


@dataclass(slots=True, eq=False)
class Send:
    """Deliver `message` to `receiver`. It may be late or lost, never duplicated."""

    receiver: Rank
    message: Message


@dataclass(slots=True)
class SetTimer:
    """Wake me with `TimerFired(name)` at `at` instead of earlier settings; inf: never."""

    name: str
    at: Seconds


@dataclass(slots=True)
class Finish:
    """The worker has no work left.

    Events may still come, and are answered: mass may be in flight. A run ends when all who
    are online have finished and no work or message is under way; timers do not keep it open.
    """


Effect: TypeAlias = Train | Evaluate | Predict | Assign | Send | SetTimer | Finish


@dataclass(frozen=True, slots=True)
class Role:
    """What a rank does in a run.

    Attributes:
        name: "worker", "server", "stage-0": also says which model a driver builds for it.
        has_data: It gets a shard of the training data.
        is_evaluated: Its parameters count in the averaged model that is reported. Ranks of one
            role name are averaged; where roles hold parts of a model, the task joins them.
    """

    name: str
    has_data: bool = True
    is_evaluated: bool = True


WORKER = Role("worker")


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """What every driver may read of a state; algorithms add their own fields.

    Attributes:
        rank: Whose state this is.
        params: What training starts from, [num_params].
        round: Rounds completed so far.
    """

    rank: Rank
    params: Tensor
    round: int = 0

    @property
    def estimate(self) -> Tensor:
        """The parameters to evaluate, [num_params]; push-sum divides by its weight here."""
        return self.params


State = TypeVar("State", bound=WorkerState)
