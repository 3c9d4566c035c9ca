"""Consensus steps for each compression, on quadratic problems.

Fields of a row:
    run, lr, keep_ratio: Settings of the row.
    errors: For each consensus step, the workers' distance from their mean, relative to that of
        their optima; null for diverged runs.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import edgegossip as eg
from edgegossip.compression.sparse import largest
from edgegossip.contract.metrics import consensus_distance
from edgegossip.contract.protocol import Payload, Train
from edgegossip.contract.randomness import generator
from edgegossip.contract.schema import TensorSpec
from edgegossip.contract.trainer import TrainingResult
from edgegossip.runs.exhibits import Exhibits, Panel
from edgegossip.runs.study import Cell, Row, Session, Study
from edgegossip.training.quadratic import QuadraticTrainer
from studies.contest import StudySettings
from studies.exhibits import Line, figure_and_tables, panel, table

NUM_WORKERS = 8
ALGORITHMS: Mapping[str, Callable[..., eg.Algorithm[Any]]] = {
    "sparse-push": eg.SparsePush,
    "difference-push": eg.DifferencePush,
}
DIVERGED = 10.0
"""Distance, relative to that of the optima, at which a run counts as diverged."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values to try.

    Args:
        keep_ratios: Shares of the entries that are kept.
        steps: Consensus steps.
        lrs: Learning rates; 0 means averaging without training.
        dim: Number of parameters.
        num_rounds: Number of rounds of each run.
    """

    keep_ratios: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    steps: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    lrs: tuple[float, ...] = (0.0, 0.01)
    dim: int = 500
    num_rounds: int = 3000


SHORT = Grid(keep_ratios=(0.1, 1.0), steps=(0.1, 1.0), lrs=(0.0, 0.1), dim=50, num_rounds=60)


def consensus(settings: StudySettings = StudySettings()) -> Study:
    """A map of compression and consensus step: the workers' final distance on quadratics.

    A line on the map shows the default step. The study needs no data and takes 15 minutes on
    one core.

    Args:
        settings: Settings of the study; only the first seed counts.
    """
    grid = SHORT if settings.short else Grid()
    return Study(
        name="sparse-push/consensus",
        title="Which consensus step suits which compression?",
        printed=(
            "The paper's choice of steps is not available to us. The first author's code "
            "uses 1 without compression, and 0.01 if 1 % is kept.",
        ),
        scaled_down=(
            f"{NUM_WORKERS} workers in a directed ring with quadratics of {grid.dim} "
            f"parameters and random optima replace models; {grid.num_rounds:,} rounds each.",
        ),
        settings={**settings.plain(), "grid": dataclasses.asdict(grid)},
        cells=tuple(_cells(grid, settings.seeds[0])),
        exhibit=partial(_exhibit, grid),
    )


def _cells(grid: Grid, seed: int) -> Iterator[Cell]:
    for name in ALGORITHMS:
        for lr in grid.lrs:
            for keep_ratio in grid.keep_ratios:
                yield Cell(
                    name=f"{name}/lr{lr:g}/keep{keep_ratio:g}",
                    group=name,
                    work=partial(_work, grid, seed, name, lr, keep_ratio),
                )


def _work(
    grid: Grid, seed: int, name: str, lr: float, keep_ratio: float, session: Session
) -> Row:
    targets = torch.randn(NUM_WORKERS, grid.dim, generator=generator(seed, "targets"))
    errors = [distance(grid, targets, name, lr, keep_ratio, step) for step in grid.steps]
    return {"run": name, "lr": lr, "keep_ratio": keep_ratio, "errors": errors}


def distance(
    grid: Grid, targets: Tensor, name: str, lr: float, keep_ratio: float, step: float
) -> float | None:
    """Final distance of the workers from their mean, relative to that of the targets.

    Args:
        grid: Grid with the number of rounds.
        targets: Targets of the quadratics, [num_workers, dim].
        name: Name of the algorithm.
        lr: Learning rate of the gradient steps; with 0 the workers only average their targets.
        keep_ratio: Share of the entries that is kept.
        step: The consensus step.

    Returns:
        The distance; None if the run diverged.
    """
    algorithm = ALGORITHMS[name](
        topology=eg.directed_ring(NUM_WORKERS),
        num_rounds=grid.num_rounds,
        compressor=Unpacked(keep_ratio),
        consensus_step=step,
    )
    with warnings.catch_warnings():
        # Diverging steps are expected here.
        warnings.filterwarnings("ignore", "consensus_step")
        return _simulated(algorithm, targets, lr)


def _simulated(algorithm: eg.Algorithm[Any], targets: Tensor, lr: float) -> float | None:
    simulator = eg.Simulator(
        algorithm,
        (eg.Platform(throughput=1.0),) * NUM_WORKERS,
        torch.zeros(targets.shape[1]),
        lambda rank, incarnation: (
            QuadraticTrainer(targets[rank], lr) if lr else Stays(targets[rank])
        ),
    )
    simulator.run()
    found = consensus_distance(torch.stack([*simulator.estimates().values()]))
    share = float(found) / float(consensus_distance(targets))
    return share if share < DIVERGED else None  # None for NaN, too


class Stays(QuadraticTrainer):
    """A trainer that moves to its target in the first step and then leaves parameters alone."""

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        moving = QuadraticTrainer(self.target, lr=1.0 if progress == 0 else 0.0)
        return moving.train(request, progress)


class Unpacked(eg.TopK):
    """A `TopK` that sends dense vectors, zeros included, because this is faster."""

    def compress(self, vector: Tensor, *key: int | str) -> Payload:
        [num_kept] = self.num_kept((vector.numel(),))
        positions = torch.from_numpy(largest(vector.numpy(), num_kept))
        return {"values": torch.zeros_like(vector).index_copy_(0, positions, vector[positions])}

    def decompress(self, payload: Payload, numel: int) -> Tensor:
        return payload["values"]

    def schema(self, numel: int) -> Mapping[str, TensorSpec]:
        return {"values": TensorSpec(torch.float32, (numel,))}


def _exhibit(grid: Grid, rows: Mapping[str, Row]) -> Exhibits:
    return figure_and_tables(
        "consensus",
        "Final distance between workers",
        "Root mean square distance of the workers from their mean after the last round, "
        "divided by that of their optima; hatched: diverged. The line is the default step, the "
        "compressor's own. With lr 0 workers only average; otherwise each pulls toward its own "
        "optimum, so some distance must remain.",
        (
            _panel(grid, name, lr, cells)
            for name in ALGORITHMS
            for lr in grid.lrs
            if (cells := [r for r in rows.values() if (r["run"], r["lr"]) == (name, lr)])
        ),
        table(
            "The best of the tried steps",
            (_line(grid, row) for row in rows.values()),
            "The workers' distance from their mean, divided by that of their optima.",
        ),
    )


def _panel(grid: Grid, name: str, lr: float, cells: list[Row]) -> Panel:
    errors = {row["keep_ratio"]: row["errors"] for row in cells}
    levels: dict[str, tuple[Iterable[float], Iterable[float]]] = {
        f"{step:g}": (errors, [each[place] for each in errors.values()])
        for place, step in enumerate(grid.steps)
    }
    rule = [eg.TopK(each).consensus_step(grid.dim) for each in errors]
    return panel(
        f"{name}, lr {lr:g}",
        levels | {"default step": (errors, rule)},
        mark="default step",
        kind="map",
        x_label="share of entries kept",
        y_label="consensus step",
        y_unit="number",
    )


def _line(grid: Grid, row: Row) -> Line:
    """The best step of a row and the largest that did not diverge."""
    known = [
        (error, step)
        for error, step in zip(row["errors"], grid.steps, strict=True)
        if error is not None
    ]
    error, step = min(known, default=(None, None))
    return {
        "run": ("text", row["run"]),
        "lr": ("number", row["lr"]),
        "kept": ("percent", row["keep_ratio"]),
        "best step": ("number", step),
        "distance left": ("number", error),
        "largest that holds": ("number", max((step for _, step in known), default=None)),
    }
