"""Do balanced epochs end together while the load changes every few seconds?

    python -m benchmarks.balanced_epochs [--epochs 40] [--phase 8]

Four uneven platforms (1 : 0.8 : 0.33 : 0.25 of 1,000 samples/s), each with loads of its own
that change every `--phase` seconds on average; shards of 12,500 samples in batches of 64;
nothing is really trained. The spread of an epoch is the time between the first and the last
worker that are through with it, over the time that the epoch took. Forecast errors are those of
every forecast against what was done until the next one, as far as a worker trained throughout.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.edge_gossip.state import BalancedState
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Predicted,
    Rank,
    Seconds,
    Send,
    Train,
    Trained,
)
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.recipes.epoch_times import only_taken
from edgegossip.sim.machines import profile
from edgegossip.sim.platform import Platform, uneven
from edgegossip.sim.simulator import Simulator
from edgegossip.sim.traces import batch_jobs
from edgegossip.training.sampling.batches import BatchStream
from edgegossip.training.sampling.sampler import AccuracyAwareSampler
from edgegossip.training.sampling.selection import Random

SHARD = 12_500


class Untrained(Trainer):
    """Takes the batches of a real learner and does nothing with them."""

    def __init__(self, rank: Rank) -> None:
        self.stream = BatchStream(
            AccuracyAwareSampler(
                num_samples=SHARD, batch_size=64, selection=Random(), key=(0, rank)
            )
        )

    @property
    def num_samples(self) -> int:
        return SHARD

    def cost(self, request: Train) -> float:
        begins = request.begins_pass
        return self.stream.cost(request.work, request.keep_ratio, begins_pass=begins)

    def train(self, request: Train, progress: float = 0.0) -> TrainingResult:
        taken = self.stream.take(
            request.work, request.keep_ratio, begins_pass=request.begins_pass
        )
        return only_taken(taken, request)

    def state_dict(self) -> Mapping[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Watched(EdgeGossip):
    """Notes when workers begin and end epochs, and how their forecasts come out."""

    def watch(self) -> None:
        object.__setattr__(self, "ends", {})
        object.__setattr__(self, "forecasts", {})
        object.__setattr__(self, "errors", [])

    def handle(self, state: BalancedState, event: Event, now: Seconds) -> list[Effect]:
        notes: Any = self
        if isinstance(event, Trained) and event.seconds > 0:
            forecast = notes.forecasts.pop(state.rank, None)
            if forecast is not None:
                speed = event.cost / event.seconds
                notes.errors.append(abs(forecast / speed - 1))
        if isinstance(event, Predicted):
            notes.forecasts[state.rank] = event.throughput
        effects = super().handle(state, event, now)
        for effect in effects:
            if isinstance(effect, Send) and effect.message.kind == "params":
                notes.ends.setdefault(effect.message.round, {})[state.rank] = now
        return effects


def measure(
    block_share: float, is_profiled: bool, seed: int, phase: Seconds, num_epochs: int
) -> tuple[float, float, float]:
    """Median and 95th percentile of the spreads, and the mean error of forecasts."""
    platforms = tuple(
        replace(platform, trace=batch_jobs(seed=10 * seed + rank, phase=phase))
        for rank, platform in enumerate(uneven(4))
    )
    inner = EpochGossip(topology=complete(4), num_rounds=num_epochs)
    algorithm = Watched(inner=inner, block_share=block_share)
    algorithm.watch()
    simulator = Simulator(
        algorithm,
        platforms,
        torch.zeros(1),
        lambda rank, incarnation: Untrained(rank),
        make_predictor=(lambda rank: _fitted(platforms[rank], rank)) if is_profiled else None,
    )
    simulator.run()
    notes: Any = algorithm
    ends = [sorted(of.values()) for _, of in sorted(notes.ends.items())]
    starts = [0.0, *(each[-1] for each in ends)]
    spreads = [
        (each[-1] - each[0]) / (each[-1] - start)
        for each, start in zip(ends, starts, strict=False)
    ]
    high = sorted(spreads)[math.ceil(0.95 * len(spreads)) - 1]
    return statistics.median(spreads), high, statistics.mean(notes.errors)


def _fitted(platform: Platform, rank: Rank) -> PerformancePredictor:
    predictor = PerformancePredictor(platform.executors)
    predictor.fit(profile(platform, seed=rank))
    return predictor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--phase", type=float, default=8.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"loads change every {options.phase:g} s; medians over seeds 0 to 4 (range)")
    print(
        "block_share profiled   spread of an epoch's ends, median, 95 %   forecast error, mean"
    )
    for block_share in (1.0, EdgeGossip.block_share):
        for is_profiled in (False, True):
            found = [
                measure(block_share, is_profiled, seed, options.phase, options.epochs)
                for seed in range(5)
            ]
            shown = [
                f"{statistics.median(of):6.1%} ({min(of):.1%} to {max(of):.1%})"
                for of in zip(*found, strict=True)
            ]
            print(f"{block_share:11g} {is_profiled!s:8s}", *shown, sep="   ", flush=True)


if __name__ == "__main__":
    main()
