"""Why numerator, weight and error memory belong together: the figure of docs/sparse-push.md.

Eight workers average vectors along a directed graph; in some runs, a part of Sparse-Push is
left out. This takes seconds and gives the same picture each time:

    python examples/sparse_push.py docs/images/sparse-push.svg
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from torch import Tensor

import edgegossip as eg
from edgegossip.algorithms.push_sum.push_sum import Offer, PushSum
from edgegossip.algorithms.push_sum.sparse_push import SparsePushState
from edgegossip.contract.protocol import Rank, Trained
from edgegossip.contract.randomness import generator
from edgegossip.report.style import (
    BASELINE_COLOR,
    INK,
    RUN_COLORS,
    figure_style,
    new_figure,
    render,
)
from edgegossip.sim.platform import Platform
from edgegossip.sim.simulator import Simulator
from edgegossip.training.quadratic import QuadraticTrainer

NUM_WORKERS, DIM, NUM_ROUNDS = 8, 100, 150
RING = [(rank, (rank + 1) % NUM_WORKERS) for rank in range(NUM_WORKERS)]
# Many send to worker 0 besides, so it ends with eight times the weight of worker 3.
TOPOLOGY = eg.from_edges(
    NUM_WORKERS, [*RING, (0, 4), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0)], directed=True
)
TOP_TENTH = eg.TopK(keep_ratio=0.1)


class Undivided(SparsePushState):
    """A state that takes the numerator as its estimate."""

    @property
    def estimate(self) -> Tensor:
        return self.params


class WithoutWeight(eg.SparsePush):
    """Sparse-Push that ignores the weight."""

    def init(self, rank: Rank, params: Tensor) -> SparsePushState:
        return Undivided(rank=rank, params=params, error=torch.zeros_like(params))

    def learn(self, state: SparsePushState, trained: Trained) -> None:
        state.params = trained.params


class WithoutMemory(eg.SparsePush):
    """Sparse-Push that forgets what it has held back."""

    def offers(self, state: SparsePushState, receivers: Sequence[Rank]) -> Iterable[Offer]:
        offers = super().offers(state, receivers)
        state.error = torch.zeros_like(state.error)
        return offers


@dataclass(frozen=True, eq=False)
class Course:
    """The course of the rounds; row 0 is the start.

    Attributes:
        numerators: [num_rounds + 1, num_workers, dim], float64.
        weights: [num_rounds + 1, num_workers], float64.
        estimates: [num_rounds + 1, num_workers, dim], float64.
    """

    numerators: Tensor
    weights: Tensor
    estimates: Tensor

    @property
    def mean(self) -> Tensor:
        """The vector that all should find: the mean of the starts, [dim]."""
        return self.numerators[0].mean(dim=0)

    @property
    def distances(self) -> Tensor:
        """Root mean square distances of the estimates from the mean; 1 at first, [num_rounds +
        1].
        """
        squares = (self.estimates - self.mean).square().sum(dim=2).mean(dim=1)
        return (squares / squares[0]).sqrt()

    @property
    def sums(self) -> Tensor:
        """Sums of the numerators and, last, of the weights, [num_rounds + 1, dim + 1]."""
        return torch.cat([self.numerators, self.weights[:, :, None]], dim=2).sum(dim=1)

    @property
    def drift(self) -> float:
        """The largest change of the sums, relative to the sums."""
        return float((self.sums - self.sums[0]).norm(dim=1).max() / self.sums[0].norm())


def algorithms(num_rounds: int) -> Mapping[str, PushSum[Any]]:
    """The algorithms to compare, by name, with the default consensus step."""
    compressed: Mapping[str, Callable[..., PushSum[Any]]] = {
        "without weight": WithoutWeight,
        "without memory": WithoutMemory,
        "SparsePush": eg.SparsePush,
        "DifferencePush": eg.DifferencePush,
    }
    return {
        **{
            name: make(topology=TOPOLOGY, num_rounds=num_rounds, compressor=TOP_TENTH)
            for name, make in compressed.items()
        },
        "uncompressed": eg.StochasticGradientPush(topology=TOPOLOGY, num_rounds=num_rounds),
    }


def average(algorithm: PushSum[Any], seed: int = 0) -> Course:
    """Let the workers average; their starts have a common part and a part of their own."""
    draws = generator(seed, "starts")
    starts = torch.randn(DIM, generator=draws) + torch.randn(NUM_WORKERS, DIM, generator=draws)
    simulator = Simulator(
        algorithm,
        (Platform(throughput=1.0),) * NUM_WORKERS,
        torch.zeros(DIM),
        lambda rank, incarnation: QuadraticTrainer(starts[rank], lr=0.0),
    )
    for state, start in zip(simulator.states, starts, strict=True):
        state.params = start
    numerators, weights, estimates = [], [], []
    for round in range(algorithm.num_rounds + 1):
        simulator.run(until=round + 0.5)  # a round takes a second
        numerators.append(torch.stack([state.params for state in simulator.states]))
        weights.append([state.weight for state in simulator.states])
        estimates.append(torch.stack([*simulator.estimates().values()]))
    return Course(
        torch.stack(numerators).double(),
        torch.tensor(weights, dtype=torch.float64),
        torch.stack(estimates).double(),
    )


# The figure.


def draw(courses: Mapping[str, Course]) -> bytes:
    """Draw all courses as SVG."""
    palette = (RUN_COLORS[1], RUN_COLORS[3], RUN_COLORS[0], RUN_COLORS[2], BASELINE_COLOR)
    colors = dict(zip(courses, palette, strict=True))
    with figure_style():
        figure = new_figure(9.6, 6.6)
        top, bottom = figure.subfigures(2, 1, squeeze=False)[:, 0]
        axes = top.subplots(1, 4, sharex=True, sharey=True)
        for each, letter, name in zip(axes, "abcd", courses, strict=False):
            _begin(each, f"{letter}  {name}")
            draw_entry(each, courses[name], colors[name])
        axes[0].set_ylabel("one entry of the estimates")
        mean = courses["DifferencePush"].mean
        axes[3].text(75, -0.2 + float(mean[typical_entry(mean)]), "mean", color=INK, va="top")
        distances, sums = bottom.subplots(1, 2)
        _begin(distances, "e  distance of the estimates from the mean")
        draw_distances(distances, courses, colors)
        _begin(sums, "f  weights in SparsePush, and what never changes")
        draw_sums(sums, courses["SparsePush"])
        return render(figure, "svg")


def _begin(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("round")


def typical_entry(mean: Tensor) -> int:
    """Index of the entry whose mean has median magnitude."""
    return int(mean.abs().argsort()[DIM // 2])


def draw_entry(axes: Axes, course: Course, color: str) -> None:
    """Draw one line for each worker and, dashed, the value that all should find."""
    entry = typical_entry(course.mean)
    axes.plot(course.estimates[:, :, entry], color=color, linewidth=0.9, alpha=0.8)
    axes.axhline(float(course.mean[entry]), color=INK, linewidth=1.2, linestyle=(0, (4, 3)))


def draw_distances(
    axes: Axes, courses: Mapping[str, Course], colors: Mapping[str, str]
) -> None:
    axes.set_yscale("log")
    axes.set_ylim(6e-5, 2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    for name, course in courses.items():
        axes.plot(course.distances, color=colors[name], label=name, linewidth=1.8)
    axes.legend(frameon=False, fontsize=9)


def draw_sums(axes: Axes, course: Course) -> None:
    weights = axes.plot(course.weights, color=BASELINE_COLOR, linewidth=1, alpha=0.8)
    weights[0].set_label("weight of each worker")
    means = course.sums / NUM_WORKERS
    entry = typical_entry(course.mean)
    axes.plot(means[:, -1], color=RUN_COLORS[4], linewidth=4, label="mean of the weights")
    axes.plot(
        means[:, entry] / means[0, entry],
        color=INK,
        linewidth=1.4,
        linestyle=(0, (4, 3)),
        label="mean of the numerators, over that at the start",
    )
    axes.set_ylim(0, 3.6)
    axes.legend(frameon=False, fontsize=9, loc="upper right")


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "sparse-push.svg")
    courses = {name: average(each) for name, each in algorithms(NUM_ROUNDS).items()}
    for name, course in courses.items():
        left, drift = float(course.distances[-1]), course.drift
        print(f"{name:15} leaves {left:7.2%} of the distance; sums moved by {drift:.0e}")
    out.write_bytes(draw(courses))
    print(f"figure: {out}")


if __name__ == "__main__":
    main()
