"""Lies in the right form: whatever a schema allows may arrive, from anyone and at any time.

    python -m tests.protocol_fuzz                            a table
    python -m tests.protocol_fuzz --events 2000000 --seed 3  more of it
    python -m tests.protocol_fuzz --only asp-standby --world 17 --seed 3   one world again

Each world has one of `FUZZED`. Random events drive its workers: messages arrive
in any order, twice or never; workers crash, return, lose sight of each other; timers fire;
training ends or goes back. Among the messages are forged ones: anything that the schema allows,
with extreme numbers, or an honest message with something changed.

Two things must hold. `handle` raises nothing but `ServerLostError`. And all that an honest
worker sends passes the checks of all others: else they would mute it for the lie of a third.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch
from tests.algorithms import ALL, NUM_WORKERS
from tests.worlds import (
    NUM_PARAMS,
    ManySamples,
    ObedientStage,
    UnitTrainer,
    claims_units,
    stages_in,
)
from torch import Tensor

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import (
    Assign,
    Assigned,
    Effect,
    Evaluate,
    Evaluated,
    Event,
    Layout,
    Message,
    Predict,
    Predicted,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.schema import Limits, MessageSpec, TensorSpec
from edgegossip.net.guard.admission import Admission, Admitted
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.real.best_model import with_best
from edgegossip.runs.best import KeepBest
from edgegossip.runs.final_average import with_final_average

WITH_BEST = {
    f"{name}-best": with_best(ALL[name], NUM_WORKERS, KeepBest(patience=patience))
    for name, patience in {"epoch-gossip": None, "gosgd": None, "bsp": 8, "adpsgd": 8}.items()
}
"""Algorithms that also keep the best model, as on a real network."""
FUZZED = {**ALL, **WITH_BEST}
RUN = b"in shape"
EVENTS_A_WORLD = 500
PARAMS = torch.zeros(NUM_PARAMS)
LARGE = 1e6
"""Where a tensor has no limits. `Plausibility` rejects what is far above the usual."""
WHOLE: tuple[int, ...] = (
    0,
    1,
    2,
    3,
    7,
    2**31,
    2**40,
    *(2**e + d for e in (52, 53) for d in (-2, -1, 0, 1)),
)


# Messages within a schema.


def draw_number(limits: Limits, draw: random.Random, known: Sequence[float] = ()) -> float:
    """A number within `limits`: an extreme one, or like the `known` ones."""
    like = draw.choice(known) + draw.choice((-1, 0, 1)) if known else 0
    if isinstance(limits, range):
        if known and like in limits and draw.random() < 0.5:
            return int(like)
        first, last = limits.start, limits.stop - 1
        near = (first, first + 1, last, last - 1, draw.randint(first, last), *WHOLE)
        return draw.choice([number for number in near if number in limits])
    low, high = (min(max(limit, -1e300), 1e300) for limit in limits)
    if known and low <= like <= high and draw.random() < 0.5:
        return float(like)
    more = (low, high, low + 1.0, high / 2, draw.random(), draw.uniform(low, high), 1e-300)
    return draw.choice([float(number) for number in more if low <= number <= high])


def draw_tensor(spec: TensorSpec, draw: random.Random) -> Tensor:
    """A tensor that `spec` allows."""
    shape, most = [], spec.max_numel or 0
    fixed = math.prod(length for length in spec.shape if length is not None)
    for length in spec.shape:
        free = most // max(1, fixed)
        shape.append(draw.choice((0, 1, free, max(0, free - 1))) if length is None else length)
    if spec.dtype.is_floating_point:
        low, high = max(spec.minimum, -LARGE), min(spec.maximum, LARGE)
    else:
        info = torch.iinfo(spec.dtype)
        low, high = max(spec.minimum, info.min), min(spec.maximum, info.max)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    match draw.randrange(4):
        case 0:
            value = draw.choice((low, high, min(max(0, low), high)))
            return _full(shape, value, spec.dtype)
        case 1 if not spec.dtype.is_floating_point:
            # A float's 53 bits hold no 64 random ones.
            wide = [draw.randint(int(low), int(high)) for _ in range(math.prod(shape))]
            return torch.tensor(wide, dtype=spec.dtype).reshape(shape)
        case 2:
            value = min(max(draw.choice(WHOLE), low), high)
            return _full(shape, value, spec.dtype)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn.clamp(low, high).to(spec.dtype)


def _full(shape: Sequence[int], value: float, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, value if dtype.is_floating_point else int(value), dtype=dtype)


def draw_round(spec: MessageSpec, own_round: int, draw: random.Random) -> int:
    """A round that a worker in `own_round` accepts."""
    most = 2**40 if spec.max_round is None else spec.max_round
    if spec.max_ahead is not None:
        most = min(most, own_round + spec.max_ahead)
    near = (0, 1, own_round - 1, own_round, own_round + 1, most, most - 1)
    return min(max(0, draw.choice(near)), most)


Known: TypeAlias = Mapping[str, Sequence[float]]
"""Numbers of messages that were sent lately, by name."""


def draw_message(
    schema: Mapping[str, MessageSpec], own_round: int, draw: random.Random, known: Known
) -> Message:
    """Any message that a worker in `own_round` accepts."""
    kind = draw.choice([*schema])
    spec = schema[kind]
    share = draw.choice((0.0, 0.5, 1.0))
    names = [*spec.tensors, *(name for name in spec.optional if draw.random() < share)]
    optional = {n: each for n, each in spec.optional_numbers.items() if draw.random() < share}
    limits = {**spec.numbers, **optional}
    numbers = {n: draw_number(each, draw, known.get(n, ())) for n, each in limits.items()}
    payload = {name: draw_tensor(spec.specs[name], draw) for name in names}
    return Message(kind, draw_round(spec, own_round, draw), payload, numbers)


def change(
    message: Message,
    schema: Mapping[str, MessageSpec],
    own_round: int,
    draw: random.Random,
    known: Known,
) -> Message:
    """An honest message, of which something is changed within the schema."""
    spec = schema[message.kind]
    payload, numbers = dict(message.payload), dict(message.numbers)
    limits = {**spec.numbers, **spec.optional_numbers}
    match draw.choice((0, 0, 0, 1, 2, 3)):
        case 0 if numbers:
            name = draw.choice([*numbers])
            numbers[name] = draw_number(limits[name], draw, known.get(name, ()))
        case 1 if payload:
            name = draw.choice([*payload])
            payload[name] = draw_tensor(spec.specs[name], draw)
        case 2:
            return replace(message, round=draw_round(spec, own_round, draw))
        case 3:
            for each, optional in ((payload, spec.optional), (numbers, spec.optional_numbers)):
                for name in [name for name in each if name in optional]:
                    if draw.random() < 0.5:
                        del each[name]
    return Message(message.kind, message.round, payload, numbers)


# A world.


@dataclass
class Member:
    """A worker, and what its driver owes it."""

    state: Any
    trainer: ManySamples
    sound: Tensor
    is_online: bool = True
    training: Train | None = None
    owed: list[Effect] = field(default_factory=list)
    timers: dict[str, Seconds] = field(default_factory=dict)
    unseen: set[Rank] = field(default_factory=set)


class BrokenPromiseError(Exception):
    """An honest worker has sent what others reject, or trains twice at once."""


class Crowd:
    """Workers of one algorithm that random events drive, and forged messages reach."""

    def __init__(self, algorithm: Algorithm[Any], draw: random.Random) -> None:
        self.draw = draw
        self.algorithm = varied(algorithm, draw)
        if draw.random() < 0.3:  # as on a real network
            ends_at = draw.choice((math.inf, 20.0))
            self.algorithm = with_final_average(self.algorithm, NUM_WORKERS, ends_at, PARAMS)
        self.schema = self.algorithm.schema(PARAMS)
        self.now: Seconds = 0.0
        self.layout = draw.choice((None, Layout(NUM_PARAMS - 2)))
        # Few lie as a rule; of several liars, each may confirm the other.
        self.liars = draw.sample(range(NUM_WORKERS), draw.choice((1, 1, 2, NUM_WORKERS)))
        self.share_forged = draw.choice((0.02, 0.1, 0.3))
        self.share_of_faults = draw.choice((0.002, 0.02, 0.06))
        self.flying: list[tuple[Rank, Rank, Message]] = []
        self.recent: list[Message] = []
        self.counts: Counter[str] = Counter()
        self.saved: dict[Rank, Member] = {}
        self.members = [self._member(rank) for rank in range(NUM_WORKERS)]
        self.admissions = [
            Admission(run=RUN, rank=rank, num_workers=NUM_WORKERS, schema=self.schema)
            for rank in range(NUM_WORKERS)
        ]
        for rank in range(NUM_WORKERS):
            self._start(rank)

    def _member(self, rank: Rank) -> Member:
        stages = stages_in(self.algorithm)
        if stages is not None:
            trainer: ManySamples = ObedientStage(stages, rank)
        else:
            kind = UnitTrainer if claims_units(self.algorithm) else ManySamples
            trainer = kind(rank, 0.1, 4 if self.algorithm.role(rank).has_data else 0)
        return Member(self.algorithm.init(rank, PARAMS), trainer, PARAMS)

    def _start(self, rank: Rank, has_rejoined: bool = False) -> None:
        trainer, life = self.members[rank].trainer, self.draw.getrandbits(62)
        size = trainer.num_samples
        data = (size, float(size), self.layout)
        self.tell(rank, Started(has_rejoined, *data, life, trainer.num_units))

    def tell(self, rank: Rank, event: Event) -> None:
        """Have a worker handle `event`, and carry out the effects."""
        member = self.members[rank]
        self.counts["events"] += 1
        try:
            effects = self.algorithm.handle(member.state, event, self.now)
        except ServerLostError:
            self.counts["ended"] += 1
            self._crash(rank)
            return
        for effect in effects:
            match effect:
                case Send():
                    self._check(rank, effect)
                    self.flying.append((rank, effect.receiver, effect.message))
                    self.recent.append(effect.message)
                case Train():
                    if member.training is not None:
                        raise BrokenPromiseError(f"worker {rank} trains twice at once")
                    member.training = effect
                case SetTimer(name, at):
                    member.timers.pop(name, None)
                    if at < math.inf:
                        member.timers[name] = at
                case Evaluate() | Predict() | Assign():
                    member.owed.append(effect)
        self.recent = self.recent[-30:]
        # What is not delivered in time is lost, as on a slow link that is cut.
        self.flying = self.flying[-300:]

    def _check(self, sender: Rank, send: Send) -> None:
        """Fail unless every other worker, in whatever round, accepts the message."""
        message, receiver = send.message, send.receiver
        if not 0 <= receiver < NUM_WORKERS or receiver == sender:
            raise BrokenPromiseError(f"worker {sender} sends {message.kind!r} to {receiver}")
        spec = self.schema.get(message.kind)
        wrong = "unknown kind" if spec is None else None
        if spec is not None:
            limits = [most for most in (spec.max_round, spec.max_ahead) if most is not None]
            if not 0 <= message.round <= min([*limits, 2**63]):
                wrong = f"round {message.round} is beyond {limits}"
            wrong = wrong or spec.mismatch(message.payload, message.numbers)
            wrong = wrong or spec.bad_values(message.payload, message.numbers)
        if wrong:
            raise BrokenPromiseError(f"worker {sender} sends {message.kind!r}: {wrong}")

    # Events.

    def step(self) -> None:
        """Let one thing happen."""
        draw = self.draw
        self.now += draw.choice((0.0, 0.01, 0.1, 1.0)) * draw.random()
        if draw.random() < self.share_forged:
            return self._forge()
        if draw.random() < self.share_of_faults:
            return self._disturb()
        happens = (self._deliver, self._train, self._answer, self._fire)
        return draw.choices(happens, (6, 3, 1, 1))[0]()

    def _some(self, what: str) -> Rank | None:
        """A random worker that is owed `what`."""
        ready = [
            rank
            for rank, member in enumerate(self.members)
            if member.is_online and getattr(member, what)
        ]
        return self.draw.choice(ready) if ready else None

    def _deliver(self) -> None:
        if not self.flying:
            return
        # Mostly in order, sometimes not.
        place = 0 if self.draw.random() < 0.7 else self.draw.randrange(len(self.flying))
        sender, receiver, message = self.flying.pop(place)
        takes_repeats = self.algorithm.traits.takes_repeats
        if takes_repeats and self.draw.random() < 0.05:
            self.flying.append((sender, receiver, message))
        member = self.members[receiver]
        if not member.is_online or sender in member.unseen or self.draw.random() < 0.03:
            return
        if sender in self.liars and self.draw.random() < self.share_forged:
            message = self._changed(message, member.state.round)
        self._receive(sender, receiver, message)

    def _receive(self, sender: Rank, receiver: Rank, message: Message) -> bool:
        """Hand over what passes the receiver's checks; return whether it has."""
        frame = bytearray().join(pack(Envelope(RUN, sender, 1, 1, 1), message))
        round = self.members[receiver].state.round
        verdict = self.admissions[receiver].admit(sender, frame, round)
        if isinstance(verdict, Admitted):
            self.tell(receiver, Received(sender, verdict.message))
        return isinstance(verdict, Admitted)

    def _forge(self) -> None:
        sender = self.draw.choice(self.liars)
        receiver = self.draw.choice([j for j in range(NUM_WORKERS) if j != sender])
        member = self.members[receiver]
        if not member.is_online or sender in member.unseen:
            return
        round = member.state.round
        if self.recent and self.draw.random() < 0.6:
            message = self._changed(self.draw.choice(self.recent), round)
        else:
            message = draw_message(self.schema, round, self.draw, self._known)
        self.counts["forged"] += 1
        self.counts["let in"] += self._receive(sender, receiver, message)

    @property
    def _known(self) -> Known:
        known: dict[str, list[float]] = {}
        for message in self.recent:
            for name, number in message.numbers.items():
                known.setdefault(name, []).append(number)
        return known

    def _changed(self, message: Message, round: int) -> Message:
        for _ in range(self.draw.choice((1, 1, 2, 4))):
            message = change(message, self.schema, round, self.draw, self._known)
        return message

    def _train(self) -> None:
        if (rank := self._some("training")) is None:
            return None
        member = self.members[rank]
        request, member.training = member.training, None
        assert request is not None
        if not request.params.isfinite().all() or self.draw.random() < 0.01:
            back = replace(Trained.skipped(member.sound), has_gone_back=True)
            return self.tell(rank, back)
        done, member.sound = member.trainer.train(request), request.params
        trained = Trained(
            params=done.params,
            before=request.params,
            num_samples=done.num_samples,
            num_steps=done.num_steps,
            seconds=self.draw.choice((0.0, 0.1, 1.0)),
            loss=done.loss,
            outputs=done.outputs,
            cost=member.trainer.cost(request),
        )
        return self.tell(rank, trained)

    def _answer(self) -> None:
        if (rank := self._some("owed")) is None:
            return
        member = self.members[rank]
        match member.owed.pop(0):
            case Evaluate():
                loss = self.draw.choice((0.0, 1.0, math.nan, math.inf, self.draw.random()))
                self.tell(rank, Evaluated(loss))
            case Predict():
                self.tell(rank, Predicted(self.draw.choice((0.0, 1.0, 10.0, 1e6))))
            case Assign(ranks):
                member.trainer.assign(ranks)
                size = member.trainer.num_samples
                self.tell(rank, Assigned(size, float(size)))

    def _fire(self) -> None:
        if (rank := self._some("timers")) is None:
            return
        timers = self.members[rank].timers
        name = min(timers, key=timers.__getitem__)
        if timers[name] > self.now + 20.0 and self.draw.random() < 0.98:
            return  # patience rarely ends
        self.now = max(self.now, timers.pop(name))
        self.tell(rank, TimerFired(name))

    def _disturb(self) -> None:
        rank = self.draw.randrange(NUM_WORKERS)
        member = self.members[rank]
        if not member.is_online:
            return self._restart(rank)
        if self.draw.random() < 0.2:
            self.saved[rank] = copy.deepcopy(member)
            return None
        choice = self.draw.random()
        if choice < 0.2:
            return self._crash(rank)
        other = self.draw.choice([j for j in range(NUM_WORKERS) if j != rank])
        if choice < 0.6 and member.unseen:
            back = self.draw.choice(sorted(member.unseen))
            if self.members[back].is_online:
                self._join(rank, back)
            return None
        if other not in member.unseen:
            member.unseen.add(other)
            self.tell(rank, WorkerLost(other, has_lied=self.draw.random() < 0.3))
        return None

    def _join(self, rank: Rank, other: Rank, has_restarted: bool = False) -> None:
        self.members[rank].unseen.discard(other)
        self.tell(rank, WorkerJoined(other, has_restarted))

    def _crash(self, rank: Rank) -> None:
        self.members[rank].is_online = False
        for other, member in enumerate(self.members):
            if member.is_online and rank not in member.unseen:
                member.unseen.add(rank)
                self.tell(other, WorkerLost(rank))

    def _restart(self, rank: Rank) -> None:
        """Return with a new state, or one that was saved, where repeated messages do no harm.

        A worker may learn of lost ones before it starts.
        """
        missing = {j for j, each in enumerate(self.members) if not each.is_online} - {rank}
        saved = self.saved.pop(rank, None)
        if saved is not None and self.algorithm.traits.takes_repeats:
            self.members[rank], saved.is_online = saved, True
            for other in sorted(saved.unseen - missing):
                self._join(rank, other)
            for other in sorted(missing - saved.unseen):
                saved.unseen.add(other)
                self.tell(rank, WorkerLost(other))
            return self._greet(rank, has_restarted=False)
        self.members[rank] = self._member(rank)
        self.members[rank].unseen = missing
        for other in sorted(missing):
            self.tell(rank, WorkerLost(other))
        self._start(rank, has_rejoined=True)
        return self._greet(rank, has_restarted=True)

    def _greet(self, rank: Rank, *, has_restarted: bool) -> None:
        for other, member in enumerate(self.members):
            if other != rank and member.is_online:
                self._join(other, rank, has_restarted)


def varied(algorithm: Any, draw: random.Random) -> Any:  # noqa: ANN401
    """The algorithm as for a network that loses messages, at times for a lossless one."""
    if draw.random() < 0.2:
        return algorithm
    known = {each.name for each in fields(algorithm)}
    waits = {"resend_after": 2.0, "timeout": 5.0, "forget_after": 3.0, "patience": 60.0}
    changes: dict[str, Any] = {name: value for name, value in waits.items() if name in known}
    if "inner" in known:
        changes["inner"] = varied(algorithm.inner, draw)
    return replace(algorithm, **changes)


# The search.


@dataclass(frozen=True)
class Found:
    """A world in which something has gone wrong."""

    name: str
    world: int
    what: str

    @property
    def place(self) -> str:
        """The error and the line of the package that raised it, without numbers."""
        return f"{self.name}: {self.what.splitlines()[-1]}"


def run_world(name: str, seed: int, world: int, num_events: int) -> tuple[Crowd, str]:
    """Run a world; return it with a traceback, empty if all was well."""
    crowd = Crowd(FUZZED[name], random.Random(f"{seed} {name} {world}"))
    try:
        for _ in range(20 * num_events):
            if crowd.counts["events"] >= num_events:
                break
            crowd.step()
    except Exception:  # that there is none is the point
        return crowd, traceback.format_exc()
    return crowd, ""


def search(
    num_events: int,
    seed: int,
    names: Sequence[str] = (*FUZZED,),
    num_a_world: int = EVENTS_A_WORLD,
) -> tuple[Counter[str], list[Found]]:
    """Run worlds of each algorithm in turn, until so many events have happened."""
    counts: Counter[str] = Counter()
    found: list[Found] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a short vector is too small for a compressor's step
        for name, world in _turns(names):
            crowd, what = run_world(name, seed, world, num_a_world)
            counts += crowd.counts
            counts["worlds"] += 1
            found += [Found(name, world, what)] if what else []
            if counts["events"] >= num_events:
                return counts, found
    raise AssertionError("endless")


def _turns(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    world = 0
    while True:
        yield from ((name, world) for name in names)
        world += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", choices=[*FUZZED], action="append", help="an algorithm; repeat"
    )
    parser.add_argument("--world", type=int, help="this world of --only alone, with its error")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    names = options.only or [*FUZZED]
    began = time.perf_counter()
    if options.world is not None:
        crowd, what = run_world(names[0], options.seed, options.world, EVENTS_A_WORLD)
        counts, found = crowd.counts, [Found(names[0], options.world, what)] if what else []
        print(what)
    else:
        counts, found = search(options.events, options.seed, names)
    figures = {**counts, "violations": len(found), "seconds": time.perf_counter() - began}
    if options.json:
        print(json.dumps({**figures, "found": [(f.name, f.world, f.what) for f in found]}))
    else:
        for each in found:
            print(f"world {each.world} of {each.place}")
        for name, value in figures.items():
            print(f"{name:>12}  {value}")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
