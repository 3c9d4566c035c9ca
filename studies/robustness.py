"""Poisoned workers: accuracy of the honest with and without robust rules.

Fields of a row:
    division, topology: How data is divided, and who sends to whom.
    num_workers, num_liars: All workers, and the poisoned ones.
    attack, run: What the poisoned workers do ("none": they are honest), and the contender.
    seed, accuracy: Accuracy of the honest workers' average on test data: mean of the last five
        evaluations.
    accuracies, times: One number per evaluation.
    wall_run: Seconds that the run took on this machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import edgegossip as eg
from edgegossip.contract.topology import Topology
from edgegossip.data.partition import IID, Partition
from edgegossip.recipes.problems import Problem
from edgegossip.runs.exhibits import Exhibits, Figure, Panel, Series, Table
from edgegossip.runs.scoreboard import grouped, last_looks, middle
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.sim.attack import Attack
from edgegossip.sim.fault import Fault
from studies.contest import StudySettings
from studies.exhibits import Line, table
from studies.problems import HAR_CNN, MNIST_MLP, SMALL_MLP

Make: TypeAlias = Callable[["Crew", int], eg.Algorithm[Any]]
"""Makes an algorithm for a crew and a number of rounds."""
LOCAL_STEPS = 8
NONE = "none"


def exponential(num_workers: int) -> Topology:
    """Each worker and those 1, 2, 4, ... ranks further are neighbors."""
    steps = [2**k for k in range(max(1, math.ceil(math.log2(num_workers / 2))))]
    edges = {
        (min(i, j), max(i, j))
        for i in range(num_workers)
        for j in ((i + step) % num_workers for step in steps)
    }
    return eg.from_edges(num_workers, sorted(edges))


TOPOLOGIES: Mapping[str, Callable[[int], Topology]] = {
    "complete": eg.complete,
    "ring": eg.ring,
    "exponential": exponential,
}
DIVISIONS: Mapping[str, Partition] = {
    "even": IID(),
    "Dirichlet 0.1": eg.Dirichlet(alpha=0.1),
    "by subject": eg.BySubject(),
}


@dataclass(frozen=True)
class Crew:
    """Workers, some of which are poisoned.

    Args:
        num_workers: Number of workers, without a server.
        num_liars: How many of them are poisoned; spread evenly over the ranks.
        topology: Name of the graph.
    """

    num_workers: int
    num_liars: int
    topology: str = "complete"

    @property
    def graph(self) -> Topology:
        """The graph of the workers."""
        return TOPOLOGIES[self.topology](self.num_workers)

    @property
    def liars(self) -> list[int]:
        """Ranks of the poisoned workers, without a server."""
        share = self.num_workers / max(1, self.num_liars)
        return [int(share * (k + 0.5)) for k in range(self.num_liars)]

    @property
    def most_seen(self) -> int:
        """The most poisoned neighbors of an honest worker, at least 1."""
        graph, liars = self.graph, {*self.liars}
        honest = (rank for rank in range(self.num_workers) if rank not in liars)
        return max(1, *(len(liars & {*graph.in_neighbors(rank, 0)}) for rank in honest))

    def __str__(self) -> str:
        return f"{self.num_liars} of {self.num_workers}"


ATTACKS: Mapping[str, tuple[Attack, ...]] = {
    NONE: (),
    "sign flip": (eg.Scaling(by=-1.0),),
    "enlarged flip": (eg.Scaling(by=-10.0),),
    "scaling": (eg.Scaling(by=10.0),),
    "negated model": (eg.NegatedModel(),),
    "false weight": (eg.NegatedModel(), eg.FalseWeight(weight=0.5)),
    "ALIE": (eg.ALIE(),),
    "inner product": (eg.InnerProduct(),),
    "dissensus": (eg.Dissensus(),),
    "label flip": (),
    "stale replay": (eg.StaleReplay(),),
}
MAIN_ATTACKS = (NONE, "sign flip", "negated model", "ALIE", "dissensus", "label flip")


def _rule(name: str, most: int) -> eg.contract.RobustRule | None:
    rules: dict[str, eg.contract.RobustRule] = {
        "NNA": eg.NearestNeighbors(num_liars=most),
        "SCC": eg.SelfCenteredClipping(num_liars=most),
        "CS+": eg.ClippedSum(num_liars=most),
        "norm bound": eg.NormBound(),
        "trimmed mean": eg.TrimmedMean(num_liars=most),
        "median": eg.CoordinateMedian(),
        "geometric median": eg.GeometricMedian(),
        "Krum": eg.Krum(num_liars=most),
    }
    return None if name == "mean" else rules[name]


def _gossip(rule: str, crew: Crew, num_rounds: int) -> eg.Algorithm[Any]:
    return eg.Gossip(
        topology=crew.graph,
        num_rounds=num_rounds,
        local_steps=LOCAL_STEPS,
        robust=_rule(rule, crew.most_seen),
    )


def _gosgd(crew: Crew, num_rounds: int) -> eg.GoSGD:
    return eg.GoSGD(
        topology=crew.graph,
        num_rounds=num_rounds,
        local_steps=LOCAL_STEPS,
        exchange_probability=0.5,
    )


def _clipped(crew: Crew, num_rounds: int) -> eg.Algorithm[Any]:
    return eg.ClippedMessages(inner=_gosgd(crew, num_rounds))


def _push_sum(crew: Crew, num_rounds: int) -> eg.Algorithm[Any]:
    return eg.StochasticGradientPush(
        topology=crew.graph, num_rounds=num_rounds, local_steps=LOCAL_STEPS
    )


def _diloco(rule: str, crew: Crew, num_rounds: int) -> eg.Algorithm[Any]:
    return eg.DiLoCo(
        topology=crew.graph,
        num_rounds=num_rounds,
        local_steps=LOCAL_STEPS,
        outer_momentum=0.3,
        robust=_rule(rule, crew.num_liars),
    )


def _fixed_adacomm(rule: str, crew: Crew, num_rounds: int) -> eg.Algorithm[Any]:
    return eg.FixedADACOMM(
        num_workers=crew.num_workers,
        num_rounds=num_rounds,
        tau=LOCAL_STEPS,
        robust=_rule(rule, crew.num_liars),
    )


def _asp(rule: str, crew: Crew, num_rounds: int) -> eg.Algorithm[Any]:
    return eg.ASP(
        num_workers=crew.num_workers,
        num_rounds=num_rounds * LOCAL_STEPS,
        robust=_rule(rule, crew.num_liars),
    )


GOSSIP: Mapping[str, Make] = {
    rule: partial(_gossip, rule)
    for rule in (
        "mean",
        "NNA",
        "SCC",
        "CS+",
        "norm bound",
        "trimmed mean",
        "median",
        "geometric median",
        "Krum",
    )
}
"""Gossip with each rule."""
OTHERS: Mapping[str, Make] = {
    "gosgd": _gosgd,
    "gosgd clipped": _clipped,
    "push-sum": _push_sum,
    **{
        f"diloco {rule}": partial(_diloco, rule)
        for rule in ("mean", "norm bound", "median", "geometric median", "Krum")
    },
    **{
        f"server {rule}": partial(_fixed_adacomm, rule)
        for rule in ("mean", "norm bound", "trimmed mean", "median", "geometric median", "Krum")
    },
    **{f"asp {rule}": partial(_asp, rule) for rule in ("mean", "norm bound", "median")},
}
"""Other algorithms, with and without a rule."""


@dataclass(frozen=True, kw_only=True)
class Siege:
    """All attacks on some contenders, with one division of data and one crew.

    Args:
        problem: Data and model.
        division: Name of the division.
        crew: The workers.
        contenders: Contenders by name.
        attacks: Names of the attacks.
        group: Group of the cells, for `--only`.
    """

    problem: Problem
    division: str
    crew: Crew
    contenders: Mapping[str, Make]
    attacks: Sequence[str]
    group: str

    def cells(self, settings: StudySettings) -> Iterator[Cell]:
        """One cell for each attack, seed and contender."""
        crew = self.crew
        place = f"{self.group}/{self.division}-{crew.topology}-{crew}".replace(" ", "-")
        for attack, seed, run in product(self.attacks, settings.seeds, self.contenders):
            attacked = f"{place}/{attack.replace(' ', '-')}/seed{seed}"
            yield Cell(
                name=f"{attacked}/{run.replace(' ', '-').replace('+', '-plus').lower()}",
                group=self.group,
                work=partial(self.row, settings, attack, seed, run),
                scaled_down=self.problem.scaled_down,
            )

    def script(self, attack: str, offset: int) -> tuple[Fault, ...]:
        """The faults of an attack; a server moves ranks by `offset`."""
        liars = [offset + rank for rank in self.crew.liars]
        if attack == "label flip":
            return tuple(eg.FlipLabels(rank=rank) for rank in liars)
        return tuple(
            eg.Poison(rank=rank, attack=each) for rank in liars for each in ATTACKS[attack]
        )

    def row(
        self, settings: StudySettings, attack: str, seed: int, run: str, session: Session
    ) -> Row:
        """Train, and measure the honest."""
        crew, problem = self.crew, self.problem
        task = problem.task(settings.data_dir)
        task = replace(task, partition=DIVISIONS[self.division])
        steps = problem.settings.num_epochs * len(task.dataset.train) / task.batch_size
        num_rounds = max(1, round(steps / crew.num_workers / LOCAL_STEPS))
        algorithm = self.contenders[run](crew, num_rounds)
        has_server = not algorithm.role(0).has_data
        platform = eg.Platform(throughput=problem.settings.throughput)
        began = time.monotonic()
        results = session.run(
            eg.Experiment(
                task=task,
                algorithm=algorithm,
                platforms=(platform,) * (crew.num_workers + has_server),
                links=eg.Links(default=eg.Link(latency=0.005, bandwidth=12.5e6)),
                faults=eg.Faults(script=self.script(attack, int(has_server))),
                evaluation_epochs=problem.settings.num_epochs / 20,
                seed=seed,
                name=session.folder.name,
            )
        )
        accuracies = [each.metrics["accuracy"] for each in results.history]
        return {
            "division": self.division,
            "topology": crew.topology,
            "num_workers": crew.num_workers,
            "num_liars": crew.num_liars,
            "attack": attack,
            "run": run,
            "seed": seed,
            "accuracy": last_looks(accuracies),
            "accuracies": accuracies,
            "times": [each.time for each in results.history],
            "wall_run": time.monotonic() - began,
        }


CREWS = ((5, 1), (10, 2), (10, 3))


def _sieges(settings: StudySettings) -> Iterator[Siege]:
    crews = CREWS[:1] if settings.short else CREWS
    problem = (
        SMALL_MLP
        if settings.short
        else replace(MNIST_MLP, settings=replace(MNIST_MLP.settings, num_epochs=10))
    )
    for num_workers, num_liars in crews:
        even = partial(Siege, problem=problem, division="even")
        crew = Crew(num_workers, num_liars)
        attacks = ("none", "negated model") if settings.short else tuple(ATTACKS)
        gossip = [name for name in ATTACKS if name in attacks and name != "false weight"]
        yield even(crew=crew, contenders=GOSSIP, attacks=gossip, group="rules")
        few = {name: OTHERS[name] for name in ("gosgd", "gosgd clipped", "asp norm bound")}
        others = few if settings.short else OTHERS
        yield even(crew=crew, contenders=others, attacks=attacks, group="others")
    if settings.short:
        return
    by_subject = replace(HAR_CNN, settings=replace(HAR_CNN.settings, num_epochs=20))
    for division, topology, (num_workers, num_liars) in product(DIVISIONS, TOPOLOGIES, crews):
        if (division, topology) != ("even", "complete"):
            yield Siege(
                problem=by_subject if division == "by subject" else problem,
                division=division,
                crew=Crew(num_workers, num_liars, topology),
                contenders=GOSSIP,
                attacks=MAIN_ATTACKS,
                group=f"{division}-{topology}".replace(" ", "-"),
            )


def attacks(settings: StudySettings = StudySettings()) -> Study:
    """Attacks on gossip, DiLoCo and servers, with and without robust rules.

    Even data on a complete graph has all attacks (`rules` and `others`); other divisions
    (Dirichlet 0.1, by subject) and graphs (ring, exponential) have six. One of 5, 2 of 10 and
    3 of 10 workers are poisoned; "none" is the same crew without attackers, so it shows what a
    rule costs. Data: MNIST, and HAR by subject. Duration: a day on two cores for one seed;
    `--only rules` takes a part of it.

    Args:
        settings: Settings of the study.
    """
    sieges = [*_sieges(settings)]
    return Study(
        name="robustness/attacks",
        title="What do poisoned workers cost, and what does a defence?",
        printed=("No paper compares these algorithms under these attacks.",),
        settings={**settings.plain(), "local_steps": LOCAL_STEPS, "attacks": [*ATTACKS]},
        cells=tuple(cell for siege in sieges for cell in siege.cells(settings)),
        exhibit=_exhibits,
    )


NOTE = (
    "Medians over the seeds: accuracy of the honest workers' average on test data, the mean of "
    "the last five evaluations. A rule allows for as many liars as an honest worker has among "
    "its neighbors. Without attackers, all workers are honest and count."
)


def _exhibits(rows: Mapping[str, Row]) -> Exhibits:
    crews = grouped(rows.values(), "division", "topology", "num_workers", "num_liars")
    tables: list[Table] = []
    for (division, topology, num_workers, num_liars), mine in crews.items():
        for names in (GOSSIP, OTHERS):
            some = [row for row in mine if row["run"] in names]
            heading = f"{num_liars} of {num_workers}, {division}, {topology}"
            if some:
                kind = "rules of gossip" if names is GOSSIP else "other algorithms"
                tables.append(table(f"{heading}: {kind}", _lines(some, names), NOTE))
    return Exhibits(figures=_figures(crews), tables=tuple(tables))


def _figures(crews: Mapping[tuple[Any, ...], Sequence[Row]]) -> tuple[Figure, ...]:
    worst: dict[str, dict[str, float | None]] = {name: {} for name in GOSSIP}
    for (division, topology, num_workers, num_liars), rows in crews.items():
        crew = f"{num_liars} of {num_workers}, {division}, {topology}"
        for name, found in worst.items():
            mine = grouped([row for row in rows if row["run"] == name], "attack").values()
            medians = [middle(each, "accuracy") for each in mine]
            found[crew] = min((each for each in medians if each is not None), default=None)
    known = {name: found for name, found in worst.items() if any(found.values())}
    if not known:
        return ()
    panel = Panel(
        title="Accuracy under the worst attack",
        kind="bars",
        x_label="poisoned workers, data, graph",
        y_label="accuracy",
        y_unit="percent",
        series=tuple(
            Series(name=name, x=tuple(found), y=tuple(found.values()))
            for name, found in known.items()
        ),
    )
    caption = "The lowest of the medians in each table below, by rule of gossip."
    return (Figure(name="worst", heading="Worst attack", caption=caption, panels=(panel,)),)


def _lines(rows: Sequence[Row], names: Mapping[str, Make]) -> Iterator[Line]:
    by_attack = grouped(rows, "attack")
    known = [name for name in names if any(row["run"] == name for row in rows)]
    for (attack,), some in by_attack.items():
        cells = {name: [row for row in some if row["run"] == name] for name in known}
        yield {
            "attack": ("text", str(attack)),
            **{name: ("percent", middle(own, "accuracy")) for name, own in cells.items()},
        }
    honest = [row for row in rows if row["attack"] == NONE]
    clocks = {name: [row for row in honest if row["run"] == name] for name in known}
    reference = middle(clocks[known[0]], "wall_run")
    if reference:
        # The first contender is the one without a rule; times are of the whole run.
        ratios = {name: middle(own, "wall_run") for name, own in clocks.items()}
        yield {
            "attack": ("text", f"time without attackers / that of {known[0]}"),
            **{
                name: ("percent", None if wall is None else wall / reference)
                for name, wall in ratios.items()
            },
        }
