"""A rehearsal: workers measure what samples, trainings and messages cost their machines."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from edgegossip.contract.algorithm import Algorithm, Traits
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Note,
    Rank,
    Received,
    Seconds,
    Send,
    Started,
    Steps,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.schema import MessageSpec
from edgegossip.contract.topology import complete

PART = "part"
"""Kind of the notes, one for each part."""
Kind: TypeAlias = Literal["long", "short", "small", "models"]
"""Kinds of parts: long trainings, trainings of one step, and those among small messages and
among models.
"""
_KINDS: tuple[Kind, ...] = get_args(Kind)
_SHARES: Mapping[Kind, float] = {"long": 0.2, "short": 0.2, "small": 0.2, "models": 0.4}
_SMALL = 64
"""Entries of a small message: those of compressed exchanges."""
_NUM_CYCLES = 5
_NUM_ROUNDS = 1 + _NUM_CYCLES * len(_KINDS)
"""Number of parts; the first one does not count."""
_LONG: Seconds = 0.1
_MARGIN = 0.15
"""Share of a part at whose beginning and end no model is sent."""
_SETTLING: Seconds = 1.0
"""The first steps of a process are slow, and the others may begin a little later."""


@dataclass(slots=True)
class Part:
    """A worker's trainings and messages between two readings of the clock.

    Attributes:
        seconds: Its length.
        samples: Cost of its trainings, in samples.
        trainings: Number of its trainings.
        messages: Number of messages sent and received.
        bytes: Bytes of the models sent and received.
    """

    seconds: Seconds = 0.0
    samples: float = 0.0
    trainings: int = 0
    messages: int = 0
    bytes: int = 0


@dataclass(slots=True, kw_only=True)
class RehearsalState(WorkerState):
    """State of a worker in a rehearsal; `round` is the number of complete parts.

    Attributes:
        started: Beginning of the rehearsal.
        began: Beginning of the part; the first one does not count.
        part: The part so far.
        long_steps: Steps of a long training, which grow to take a tenth of a second.
        sent_at: Time of the last model.
        num_small: Number of the last small message, which went to all.
        heard: Number of small messages from each other worker.
        lost: Unreachable workers, as keys.
    """

    started: Seconds = 0.0
    began: Seconds = 0.0
    part: Part = field(default_factory=Part)
    long_steps: int = 1
    sent_at: Seconds = 0.0
    num_small: int = 0
    heard: dict[Rank, int] = field(default_factory=dict)
    lost: dict[Rank, None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rehearsal(Algorithm[RehearsalState]):
    """Train in cycles of four parts: long trainings, single steps, these among messages.

    All workers begin together, so that they are in the same part but for one training. In the
    third, each sends a small message to all others, and the next one when it has heard as many
    from each: as fast as the slowest can, so that nothing piles up. In the fourth, except at
    its beginning and end, each sends its model to the next worker again and again, and takes
    the mean of its own and each that comes. Parts are short and take turns, so that other load
    on the machine meets all alike. A note tells each part; see `costs`.

    Args:
        num_workers: Number of workers.
        seconds: Length of the five cycles together, above 0.
        message_seconds: Seconds between two models of a worker, above 0; infinite to send
            none.

    Raises:
        ValueError: If a number is out of range.
    """

    num_workers: int
    seconds: Seconds
    message_seconds: Seconds

    def __post_init__(self) -> None:
        check_ranges(self, seconds="above 0 and finite", message_seconds="above 0")

    @property
    def traits(self) -> Traits:
        return Traits(topology=complete(self.num_workers), num_rounds=_NUM_ROUNDS)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        return {
            "model": MessageSpec({"params": params}, max_round=_NUM_ROUNDS),
            "small": MessageSpec({"params": params[:_SMALL]}, max_round=_NUM_ROUNDS),
        }

    def init(self, rank: Rank, params: Tensor) -> RehearsalState:
        return RehearsalState(rank=rank, params=params)

    def handle(self, state: RehearsalState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                state.started = state.began = now
                return [self._train(state)]
            case WorkerLost():
                state.lost[event.rank] = None
            case WorkerJoined():
                state.lost.pop(event.rank, None)
            case Received(sender, message):
                state.part.messages += 1
                if message.kind == "small":
                    state.heard[sender] = state.heard.get(sender, 0) + 1
                else:
                    theirs = message.payload["params"]
                    state.params = state.params.lerp(theirs, 0.5)
                    state.part.bytes += theirs.nbytes
            case Trained():
                return self._go_on(state, event, now)
        return []

    @staticmethod
    def _kind(state: RehearsalState) -> Kind:
        """The kind of the present part; the one that does not count lengthens trainings."""
        return _KINDS[(state.round - 1) % len(_KINDS)] if state.round else "long"

    def _end(self, round: int) -> Seconds:
        """The end of a part, after the beginning of the rehearsal."""
        cycles, more = divmod(round, len(_KINDS))
        within = sum(_SHARES[kind] for kind in _KINDS[:more])
        return _SETTLING + (cycles + within) * self.seconds / _NUM_CYCLES

    def _go_on(self, state: RehearsalState, event: Trained, now: Seconds) -> list[Effect]:
        state.params = event.params
        state.part.samples += event.cost
        state.part.trainings += 1
        if event.num_steps == state.long_steps and event.seconds < _LONG / 2:
            state.long_steps *= 2
        effects: list[Effect] = []
        if now >= state.started + self._end(state.round):
            state.part.seconds = now - state.began
            if state.round:
                kind = _KINDS.index(self._kind(state))
                effects.append(Note(PART, {"kind": kind, **asdict(state.part)}))
            state.round, state.began, state.part = state.round + 1, now, Part()
            if self._is_over(state, now):
                return [*effects, Finish()]
        return [*effects, *self._send(state, now), self._train(state)]

    def _is_over(self, state: RehearsalState, now: Seconds) -> bool:
        # Where a step takes longer than a part, one cycle has to do.
        is_late = now >= state.started + self._end(_NUM_ROUNDS - 1)
        return state.round == _NUM_ROUNDS or (is_late and state.round > len(_KINDS))

    def _train(self, state: RehearsalState) -> Train:
        is_long = self._kind(state) == "long"
        return Train(state.params, Steps(state.long_steps if is_long else 1))

    def _send(self, state: RehearsalState, now: Seconds) -> list[Send]:
        match self._kind(state):
            case "small":
                sends = self._small(state)
            case "models":
                sends = self._model(state, now)
            case _:
                sends = []
        state.part.messages += len(sends)
        return sends

    def _others(self, state: RehearsalState) -> list[Rank]:
        """The workers that are there, from the next one on."""
        others = ((state.rank + k) % self.num_workers for k in range(1, self.num_workers))
        return [rank for rank in others if rank not in state.lost]

    def _small(self, state: RehearsalState) -> list[Send]:
        others = self._others(state)
        if any(state.heard.get(rank, 0) < state.num_small for rank in others):
            return []
        state.num_small += 1
        payload = {"params": state.params[:_SMALL]}
        return [Send(rank, Message("small", state.round, payload)) for rank in others]

    def _model(self, state: RehearsalState, now: Seconds) -> list[Send]:
        end = state.started + self._end(state.round)
        margin = _MARGIN * (end - state.began)
        is_amid = state.began + margin <= now < end - margin
        is_due = is_amid and now >= state.sent_at + self.message_seconds
        receivers = self._others(state)[:1] if is_due else []
        if receivers:
            state.sent_at = now
            state.part.bytes += state.params.nbytes
        payload = {"params": state.params}
        return [Send(rank, Message("model", state.round, payload)) for rank in receivers]


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a machine's work.

    Args:
        speeds: Samples per second in each part of long trainings.
        seconds_per_training: Seconds to begin and end a training, at least 0.
        seconds_per_message: Seconds of training that each message sent or received takes,
            at least 0.
        seconds_per_byte: Seconds of training that each of its bytes takes in addition, at
            least 0.

    Raises:
        ValueError: If a number is out of range, or there is no speed.
    """

    speeds: tuple[float, ...]
    seconds_per_training: Seconds
    seconds_per_message: Seconds
    seconds_per_byte: Seconds

    def __post_init__(self) -> None:
        check_ranges(self, seconds_per_training="in [0, inf)")
        check_ranges(self, seconds_per_message="in [0, inf)", seconds_per_byte="in [0, inf)")
        if not self.speeds or not all(0 < each < float("inf") for each in self.speeds):
            raise ValueError(f"speeds must be above 0 and finite, got {self.speeds}")


def costs(notes: Sequence[Mapping[str, float]]) -> Costs:
    """Find the costs that the notes of a worker's `Rehearsal` tell.

    Long and short trainings tell what a sample takes, and what a training takes besides. The
    time of short trainings among messages beyond that of as many without is the cost of the
    messages: small ones tell what each takes, and models what their bytes take besides. Medians
    of the parts count; a cost below 0 is noise.

    Args:
        notes: Numbers of the notes of kind `PART`.

    Raises:
        ValueError: If there are no parts of some kind.
    """
    parts: dict[Kind, list[Part]] = {kind: [] for kind in _KINDS}
    for note in notes:
        parts[_KINDS[int(note["kind"])]].append(
            Part(
                note["seconds"],
                note["samples"],
                *(int(note[name]) for name in ("trainings", "messages", "bytes")),
            )
        )
    if missing := [kind for kind in _KINDS if not parts[kind]]:
        raise ValueError(f"the rehearsal ended before a part of kind {missing[0]!r}")
    (long, size), (short, one) = (_training(parts[kind]) for kind in _KINDS[:2])
    # A training of n samples takes `each + n * alone`, which is known for two values of n,
    # unless a step is so slow that no training has more.
    alone = (long - short) / (size - one) if size > one else long / size
    # More than half of a long training is noise, of a machine that does much else.
    most = min(part.seconds / part.trainings for part in parts["long"]) / 2
    each = min(max(0.0, short - one * alone), most)
    of_messages = [
        (part.seconds - part.trainings * short) / part.messages
        for part in parts["small"]
        if part.messages
    ]
    of_message = max(0.0, statistics.median(of_messages)) if of_messages else 0.0
    of_bytes = [
        (part.seconds - part.trainings * short - part.messages * of_message) / part.bytes
        for part in parts["models"]
        if part.bytes
    ]
    return Costs(
        speeds=tuple(
            part.samples / (part.seconds - part.trainings * each) for part in parts["long"]
        ),
        seconds_per_training=each,
        seconds_per_message=of_message,
        seconds_per_byte=max(0.0, statistics.median(of_bytes)) if of_bytes else 0.0,
    )


def _training(parts: Sequence[Part]) -> tuple[Seconds, float]:
    """Duration and samples of a training, in the median part."""
    return (
        statistics.median(part.seconds / part.trainings for part in parts),
        statistics.median(part.samples / part.trainings for part in parts),
    )
