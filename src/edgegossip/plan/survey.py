"""A survey of machines that have joined: what each does next, and what all have measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.plan.machines import Machine
from edgegossip.plan.ranking import Outlook
from edgegossip.plan.rehearsal import Costs

Json: TypeAlias = dict[str, Any]
Pair: TypeAlias = tuple[Rank, Rank]
SILENCE: Seconds = 15.0
"""Time without a question after which a machine counts as lost."""
_WORK: Seconds = 60.0
_LINK: Seconds = 180.0
"""Time limits of measurements, beyond the time that they take by themselves."""
_ROUNDS = 100
_MEGABIT = 125_000.0
WAIT: Json = {"do": "wait"}


@dataclass(slots=True)
class _Surveyed:
    """A machine in the survey.

    Attributes:
        name: Its name.
        seen: Time of its last question.
        task: Its present instruction; None while it waits.
        end: Time at which it counts as lost.
        costs: What work costs it; None before it is measured.
        problem: Why it is lost; None if it is not.
    """

    name: str
    seen: Seconds
    task: Json | None
    end: Seconds
    costs: Costs | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The link between two machines.

    Args:
        latency: Seconds in one direction: half of the median round trip.
        spread: Range of the middle half of the round trips, over their median.
        rates: Bytes per second of each transfer from the first machine to the second, and of
            each in the other direction.
    """

    latency: Seconds
    spread: float
    rates: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def rate(self) -> float:
        """Bytes per second in the slower direction, because a machine has one bandwidth."""
        return min(map(statistics.median, self.rates))


@dataclass(frozen=True)
class Survey:
    """Measurements of machines that have joined.

    Args:
        names: Names of the machines, by rank.
        costs: What samples, trainings and messages cost each.
        links: Measured links, by ranks in ascending order.
    """

    names: Mapping[Rank, str]
    costs: Mapping[Rank, Costs]
    links: Mapping[Pair, MeasuredLink]

    @property
    def machines(self) -> tuple[Machine, ...]:
        """The machines, in order of their ranks.

        A machine's bandwidth is that of its fastest link, and latencies are those whose sums
        come nearest to the measured ones of the pairs.
        """
        latencies = fitted_latencies({pair: x.latency for pair, x in self.links.items()})
        return tuple(
            Machine(
                name=name,
                samples_per_second=_rounded(statistics.median(self.costs[rank].speeds)),
                mbits=_rounded(
                    max(x.rate for pair, x in self.links.items() if rank in pair) / _MEGABIT
                ),
                latency_ms=_rounded(1000 * latencies[rank]),
                ms_per_training=_rounded(1e3 * self.costs[rank].seconds_per_training),
                ms_per_message=_rounded(1e3 * self.costs[rank].seconds_per_message),
                ms_per_mb=_rounded(1e9 * self.costs[rank].seconds_per_byte),
            )
            for rank, name in sorted(self.names.items())
        )

    @property
    def notes(self) -> list[str]:
        """How much the numbers of each machine vary, in order of ranks."""
        return [
            f"samples/s {_percent(spread_of(self.costs[rank].speeds))}, transfers "
            f"{_percent(self._worst_transfer(rank))}, round trips "
            f"{_percent(max(x.spread for pair, x in self.links.items() if rank in pair))}"
            for rank in sorted(self.names)
        ]

    @property
    def misfit(self) -> Seconds:
        """Largest difference of a pair's latency from the sum of its machines' latencies."""
        fitted = fitted_latencies({pair: x.latency for pair, x in self.links.items()})
        return max(abs(fitted[i] + fitted[j] - x.latency) for (i, j), x in self.links.items())

    @property
    def speed_spread(self) -> float:
        """Largest spread of a machine's speed."""
        return max(spread_of(each.speeds) for each in self.costs.values())

    def _worst_transfer(self, rank: Rank) -> float:
        own = (x.rates for pair, x in self.links.items() if rank in pair)
        return max(spread_of(each) for both in own for each in both)


def spread_of(values: Sequence[float]) -> float:
    """The range of values over their median.

    >>> spread_of([9.0, 10.0, 11.0])
    0.2
    """
    return (max(values) - min(values)) / statistics.median(values)


def fitted_latencies(measured: Mapping[Pair, Seconds]) -> dict[Rank, Seconds]:
    """Latency of each machine, at least 0, by least squares on the sums of pairs.

    >>> fitted_latencies({(0, 1): 0.03, (0, 2): 0.04, (1, 2): 0.05})
    {0: 0.01, 1: 0.02, 2: 0.03}
    """
    ranks = sorted({rank for pair in measured for rank in pair})
    others = {
        rank: [(sum(pair) - rank, x) for pair, x in measured.items() if rank in pair]
        for rank in ranks
    }
    found = {rank: statistics.fmean(x for _, x in others[rank]) / 2 for rank in ranks}
    # Each step is the best value of one machine, given those of the others: coordinate descent,
    # which converges for a convex function within bounds.
    for rank in itertools.chain.from_iterable(itertools.repeat(ranks, _ROUNDS)):
        found[rank] = max(0.0, statistics.fmean(x - found[j] for j, x in others[rank]))
    return {rank: round(x, 9) for rank, x in found.items()}


Phase: TypeAlias = Literal["gathering", "links", "work", "measured", "decided", "ended"]


@dataclass
class Surveyor:
    """Tells machines what to do next, one question after the other; has no clock or socket.

    A machine asks several times a second, and reports what it has done. Each pair measures its
    link while the others wait, so that no two measurements share a link. Then all measure their
    work at once, as they will train, in a `Rehearsal`. A machine that is silent or fails is
    lost, and the survey goes on without it.

    Args:
        seconds: Time in which all measure their work.
        digest: SHA-256 of the recipe's file, in hex; None for a recipe of the package.

    Attributes:
        phase: "gathering" until `begin`; "measured" when all is known.
        news: Lines for the person who plans.
    """

    seconds: Seconds
    digest: str | None = None
    phase: Phase = "gathering"
    news: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._machines: dict[Rank, _Surveyed] = {}
        self._links: dict[Pair, MeasuredLink] = {}
        self._pairs: list[Pair] = []
        self._ids = itertools.count(1)
        self._start: Json = {}
        self._ranks: dict[Rank, Rank] = {}

    @property
    def present(self) -> dict[Rank, str]:
        """Names of the machines that take part and are not lost, by rank."""
        return {rank: x.name for rank, x in self._machines.items() if x.problem is None}

    def asked(self, rank: Rank, name: str, said: Mapping[str, Any], now: Seconds) -> Json:
        """Answer a machine's question for its next instruction.

        Args:
            rank: Its rank.
            name: Its name.
            said: Its report: "digest" of its recipe file, and after an instruction its "id"
                with "costs", "link" or "failed".
            now: Present time.

        Raises:
            NetworkError: If the machine cannot take part.
        """
        if self.phase in ("decided", "ended"):
            return self._decision(name)
        self.tick(now)
        if said.get("digest") != self.digest:
            raise NetworkError(
                f"the recipe file of {name} is not that of this plan; join with a new "
                "invitation"
            )
        machine = self._machines.get(rank)
        if machine is not None and machine.problem is not None:
            if self.phase == "gathering":  # it has come back in time
                machine = None
            else:
                raise NetworkError(f"the plan goes on without {name}: {machine.problem}")
        if machine is None or machine.name != name:
            if self.phase != "gathering":
                raise NetworkError(
                    f"{name} comes too late for this plan, which measures or has measured the "
                    "others already"
                )
            machine = self._machines[rank] = _Surveyed(name, now, None, now + SILENCE)
            self.news.append(f"{name} is here, as worker {rank}")
        machine.seen = now
        if machine.task is not None and said.get("id") == machine.task["id"]:
            self._note(rank, machine, said)
        self._go_on(now)
        if machine.problem is not None:
            raise NetworkError(f"the plan goes on without {name}: {machine.problem}")
        if machine.task is None:
            machine.end = now + SILENCE
            return WAIT
        return machine.task

    def _decision(self, name: str) -> Json:
        # By name, because a decision may have changed ranks already.
        for rank, machine in self._machines.items():
            if machine.name == name and machine.problem is None:
                return {**self._start, "rank": self._ranks.get(rank, rank)}
        raise NetworkError(f"the plan was made without {name}")

    def tick(self, now: Seconds) -> None:
        """Notice machines that are silent."""
        if self.phase in ("decided", "ended"):
            return
        for rank in self.present:
            machine = self._machines[rank]
            if now > machine.end:
                doing = "" if machine.task is None else f" while it measured its {self.phase}"
                self._lose(machine, f"nothing was heard from it{doing}")
        self._go_on(now)

    def begin(self, now: Seconds) -> None:
        """Measure those that are present."""
        self.phase = "links"
        self._pairs = [*itertools.combinations(sorted(self.present), 2)]
        self._go_on(now)

    def survey(self) -> Survey:
        """All that was measured, of those who are not lost.

        Raises:
            NetworkError: If fewer than two machines are left.
        """
        names = self.present
        if len(names) < 2:
            raise NetworkError(
                f"{len(names)} of {len(self._machines)} machines are left, and a plan needs "
                "two; see above why, and repeat the command"
            )
        return Survey(
            names=names,
            costs={rank: found for rank in names if (found := self._machines[rank].costs)},
            links={pair: x for pair, x in self._links.items() if names.keys() >= {*pair}},
        )

    def decide(self, ranks: Mapping[Rank, Rank], start: Json) -> None:
        """Tell all present machines to start, when they ask.

        Args:
            ranks: New rank of each present machine, by its present rank.
            start: What to train.
        """
        self.phase, self._start, self._ranks = "decided", {"do": "start", **start}, {**ranks}

    def end(self, reason: str) -> None:
        """Tell all machines that nothing is started."""
        self.phase, self._start = "ended", {"do": "end", "reason": reason}

    # The order of measurements.

    def _here(self) -> Iterator[_Surveyed]:
        return (each for each in self._machines.values() if each.problem is None)

    def _give(self, machine: _Surveyed, end: Seconds, **task: object) -> None:
        machine.task, machine.end = {"id": next(self._ids), **task}, end

    def _lose(self, machine: _Surveyed, problem: str) -> None:
        machine.problem, machine.task = problem, None
        self.news.append(f"{machine.name} is lost: {problem}; going on without it")

    def _go_on(self, now: Seconds) -> None:
        """Give the next instruction if nothing is left to do."""
        if any(each.task is not None for each in self._here()):
            return
        if self.phase == "work":
            self.phase = "measured"
        if self.phase != "links":
            return
        while self._pairs:
            pair = self._pairs.pop(0)
            if self.present.keys() >= {*pair}:
                one = self._machines[pair[0]]
                self._give(one, now + _LINK, do="link", to=pair[1])
                return
        self._rehearse(now)

    def _rehearse(self, now: Seconds) -> None:
        """Let all measure their work together, with messages that half of each link carries."""
        rates = [x.rate for pair, x in self._links.items() if self.present.keys() >= {*pair}]
        if not rates:  # fewer than two machines are left
            self.phase = "measured"
            return
        self.phase = "work"
        task = {"seconds": self.seconds, "present": [*self.present], "rate": min(rates)}
        for machine in self._here():
            self._give(machine, now + self.seconds + _WORK, do="work", **task)

    def _note(self, rank: Rank, machine: _Surveyed, said: Mapping[str, Any]) -> None:
        """Keep a measurement."""
        assert machine.task is not None
        task, machine.task = machine.task, None
        machine.end = machine.seen + SILENCE
        try:
            if "failed" in said:
                self._failed(machine, task, str(said["failed"])[:200])
            elif task["do"] == "work":
                machine.costs = _costs_of(said["costs"])
            else:
                self._links[rank, task["to"]] = _link_of(said["link"])
        except (KeyError, TypeError, ValueError):
            self._lose(machine, "its measurement is damaged; use the same version")

    def _failed(self, machine: _Surveyed, task: Json, problem: str) -> None:
        if task["do"] != "link":
            self._lose(machine, problem)
            return
        # The one that is asked answers in a thread of its own, so it may be the one that is
        # lost; if it still asks, the link between the two is cut, and the later one goes.
        other = self._machines[task["to"]]
        if other.problem is None:
            self._lose(other, f"{machine.name} says that {problem}")


def confidence(order: Sequence[Outlook], survey: Survey) -> str:
    """Say in a sentence how sure the first place is.

    Args:
        order: Candidates, best first.
        survey: The measurements on which the plan rests.
    """
    best, *others = order
    moved = f"measured speeds varied by up to {_percent(survey.speed_spread)}"
    rivals = [each for each in others if math.isfinite(each.seconds)]
    if math.isinf(best.seconds) or not rivals:
        return f"how sure: {moved}"
    second = min(rivals, key=lambda each: each.seconds)
    lead = second.seconds / max(best.seconds, 1e-9) - 1
    apart = max(best.times) < min(second.times)
    seeds = f"the seeds' times of the two {'do not ' if apart else ''}overlap"
    if min(len(best.times), len(second.times)) < 2:
        apart, seeds = False, "each has one seed"
    is_sure = apart and lead > survey.speed_spread
    return (
        f"how sure: {second.run} takes {_percent(lead)} longer, {seeds}, and {moved}; so the "
        f"first place is {'' if is_sure else 'not '}sure"
    )


def _numbers(values: Sequence[object]) -> tuple[float, ...]:
    found = tuple(float(each) for each in values)  # type: ignore[arg-type]
    if not found or not all(0 < each < float("inf") for each in found):
        raise ValueError
    return found


def _costs_of(said: Mapping[str, Any]) -> Costs:
    return Costs(
        speeds=tuple(map(float, said["speeds"])),
        seconds_per_training=float(said["seconds_per_training"]),
        seconds_per_byte=float(said["seconds_per_byte"]),
        seconds_per_message=float(said["seconds_per_message"]),
    )


def _link_of(said: Mapping[str, Any]) -> MeasuredLink:
    round_trips = _numbers(said["round_trips"])
    usual = statistics.median(round_trips)
    quarters = statistics.quantiles([*round_trips, usual], n=4)
    return MeasuredLink(
        latency=usual / 2,
        spread=(quarters[2] - quarters[0]) / usual,
        rates=(_numbers(said["sent"]), _numbers(said["received"])),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
