"""How far apart workers end after partitions, kills and cuts: real hosts in virtual time.

    python -m tests.end_agreement [--seeds 10] [--first 0] [--only diloco]

`measure` runs one world and returns how far the final models are from their mean. The table
shows for each algorithm and disturbance in how many worlds this exceeds `NEAR`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from tests.host_checks import unnamed_differences
from tests.host_runs import Run
from tests.host_worlds import SIZE, World
from tests.virtual_network import Wire

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Rank
from edgegossip.contract.topology import complete, directed_exponential, ring
from edgegossip.runs.final_average import FinalAverage

NUM_ROUNDS = 40
NEAR = 1e-5
"""Workers with one model are at most this far apart, as a share of its norm."""

Kind: TypeAlias = Literal["partition", "killed", "restarted", "cut", "to the end"]
Wrap: TypeAlias = Callable[[Algorithm[Any]], Algorithm[Any]]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEFT = (1, 2, 8, 25)
"""Rounds that are left after a disturbance."""

_FOUR: dict[str, Any] = {"topology": complete(4), "num_rounds": NUM_ROUNDS}
_STEPS: dict[str, Any] = {**_FOUR, "local_steps": SIZE}
ONE_MODEL: dict[str, Algorithm[Any]] = {
    "epoch-gossip": EpochGossip(**_FOUR),
    "edge-gossip": EdgeGossip(inner=EpochGossip(**_FOUR)),
    "diloco": DiLoCo(**_STEPS),
    "diloco-ring": DiLoCo(**{**_STEPS, "topology": ring(4)}),
    "double-squeeze": DoubleSqueeze(**_STEPS),
    "all-reduce": AllReduce(**_STEPS),
}
"""Algorithms whose workers have the same model after each round."""
ONE_MEAN: dict[str, Algorithm[Any]] = {
    "gosgd": GoSGD(**_STEPS, exchange_probability=0.5),
    "sgp": StochasticGradientPush(
        **{**_STEPS, "topology": directed_exponential(4)}, resend_after=5.0
    ),
    "adsp": Standby(
        inner=ADSP(num_workers=4, num_rounds=NUM_ROUNDS, window=60.0, min_interval=10.0)
    ),
}
"""Algorithms whose workers' models are only near each other."""
ALL = {**ONE_MODEL, **ONE_MEAN}


@dataclass(frozen=True, kw_only=True)
class EndAgreement:
    """How far apart workers have ended.

    Attributes:
        distance: Largest distance from the mean of all final models, as a share of its norm.
        within: The same among the workers of one group, at most.
        groups: Workers that have finished, by who could reach whom at the end.
        unfinished: Workers that were alive and did not finish, and how they ended.
        unnamed: Pairs of workers that end with different models though neither says so.
    """

    distance: float
    within: float
    groups: tuple[tuple[Rank, ...], ...]
    unfinished: dict[Rank, str]
    unnamed: list[str]


def measure(
    algorithm: Algorithm[Any],
    seed: int,
    kind: Kind,
    left: int,
    wrap: Wrap = lambda algorithm: algorithm,
) -> EndAgreement:
    """Run a disturbed world to its end.

    Args:
        algorithm: Algorithm of four or five ranks; five are divided into two and three.
        seed: Draws who is hit, the workers' speeds, the network and the precise moments.
        kind: "partition" divides workers, "cut" cuts two of their links, and both heal;
            "killed" is for good; "restarted" ends with a new process; "to the end" is a
            partition that does not heal.
        left: Rounds that the first worker has left when the disturbance is over or, if it is
            never over, begins; the rest of the round before comes on top.
        wrap: Wraps the algorithm, such as in a final average.
    """
    num_workers = _num_workers(algorithm)
    draw = random.Random(f"{seed} {kind} {left}")
    world = World(
        seed=seed,
        name=kind,
        algorithm=wrap(algorithm),
        step_seconds=tuple(draw.uniform(0.9, 1.1) for _ in range(num_workers)),
        start_at=(0.0,) * num_workers,
        wire=Wire(bandwidth=1e5),
        disturbances=(),
        meet_seconds=5.0,
        checkpoint_seconds=draw.choice([10.0, math.inf]),
    )
    run = Run(world)
    _Disturber(run, draw, kind).disturb(left)
    run.to_the_end()
    return _judge(run)


def with_mean(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    """The algorithm as on a real network, where it ends with one mean of all in reach."""
    return FinalAverage(inner=algorithm, num_workers=_num_workers(algorithm))


def _num_workers(algorithm: Algorithm[Any]) -> int:
    topology = algorithm.traits.topology
    return algorithm.num_workers + 1 if topology is None else topology.num_workers  # type: ignore[attr-defined]


def _judge(run: Run) -> EndAgreement:
    present = {r: p for r, p in sorted(run.processes.items()) if p.is_alive}
    models = {
        rank: process.host.state.estimate.double()
        for rank, process in present.items()
        if process.reason == "finished"
    }
    groups: list[list[Rank]] = []
    for rank in models:
        near = [g for g in groups if not any(run.network.is_cut(rank, j) for j in g)]
        if near:
            near[0].append(rank)
        else:
            groups.append([rank])
    return EndAgreement(
        distance=_distance([*models.values()]),
        within=max(_distance([models[rank] for rank in group]) for group in groups),
        groups=tuple(map(tuple, groups)),
        unfinished={r: repr(p.reason) for r, p in present.items() if r not in models},
        unnamed=unnamed_differences(run.world.algorithm, [present[rank] for rank in models]),
    )


def _distance(models: list[torch.Tensor]) -> float:
    stacked = torch.stack(models)
    mean = stacked.mean(0)
    return float((stacked - mean).norm(dim=1).max() / mean.norm())


@dataclass
class _Disturber:
    """Does harm when the first worker begins a certain round, and makes it good again."""

    run: Run
    draw: random.Random
    kind: Kind

    def disturb(self, left: int) -> None:
        run, draw = self.run, self.draw
        ranks = range(run.world.num_workers)
        pairs = [*itertools.combinations(ranks, 2)]
        half = draw.sample(ranks, 2)
        links = [(a, b) for a, b in pairs if (a in half) != (b in half)]
        victim = draw.choice(ranks)
        begin, end = NUM_ROUNDS // 4, NUM_ROUNDS - left - 1
        if self.kind == "cut":
            links = draw.sample(pairs, 2)
        if self.kind in ("partition", "cut"):
            self._when(begin, lambda: self._cut(links))
            self._when(end, lambda: self._heal(links))
        elif self.kind == "to the end":
            self._when(end, lambda: self._cut(links))
        elif self.kind == "killed":
            self._when(end, lambda: self._kill(victim))
        else:
            with_disk = draw.random() < 0.5
            self._when(begin, lambda: self._kill(victim))
            self._when(end, lambda: run.start_later(0.0, victim, with_disk))

    def _when(self, round: int, action: Callable[[], None]) -> None:
        """Do `action` somewhere in this round, in half of the cases while messages travel."""
        run, draw = self.run, self.draw
        run.num_due += 1
        delay = draw.choice([draw.uniform(0.0, 4.0), draw.uniform(3.6, 4.4)])

        def act() -> None:
            action()
            run.num_due -= 1

        def look() -> None:
            rounds = [p.host.state.round for p in run.processes.values() if p.is_alive]
            if rounds and max(rounds) >= round:
                run.time.at(run.time.now + delay, act)
            else:
                run.time.at(run.time.now + 0.05, look)

        run.time.at(0.1, look)

    def _cut(self, links: Iterable[tuple[Rank, Rank]]) -> None:
        for a, b in links:
            self.run.network.cut(a, b, math.inf)

    def _heal(self, links: Iterable[tuple[Rank, Rank]]) -> None:
        for a, b in links:
            self.run.network.heal(a, b)

    def _kill(self, rank: Rank) -> None:
        self.run.network.kill(rank, machine=self.draw.random() < 0.3)


def _in_short(distances: list[float]) -> str:
    """Number of worlds farther apart than `NEAR`, and the largest distance.

    >>> _in_short([0.0, 0.5, 0.25])
    '2, up to 0.5'
    """
    num_far = sum(each > NEAR for each in distances)
    return f"{num_far}, up to {max(distances):.2g}" if num_far else "-"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--mean", action="store_true", help="end with one mean of all in reach")
    parser.add_argument("--only", choices=[*ALL], nargs="*", default=[*ALL])
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    seeds = range(options.first, options.first + options.seeds)
    print(
        "algorithm       disturbance left     apart of all   apart in reach unfinished unnamed"
    )
    for name, kind, left in itertools.product(options.only, KINDS, LEFT):
        wrap: Wrap = with_mean if options.mean else lambda algorithm: algorithm
        found = [measure(ALL[name], seed, kind, left, wrap) for seed in seeds]
        distances = [each.distance for each in found]
        within = [each.within for each in found]
        num_unfinished = sum(bool(each.unfinished) for each in found)
        print(
            f"{name:15} {kind:11} {left:4} {_in_short(distances):>16} {_in_short(within):>16}"
            f" {num_unfinished:10} {sum(bool(each.unnamed) for each in found):7}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
