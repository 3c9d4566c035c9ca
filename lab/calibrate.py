"""How many samples per second does this host train?

    python -m lab.calibrate RECIPE --rank R --only NAME --go FILE [recipe's options]

Says "ready", waits until FILE exists, so that all hosts begin together, and trains as a whole
worker without neighbors, because what a worker does beside and between its training takes time
too: of 0.15 cores, a seventh. Prints the throughput.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.cli.command import parse_recipe
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.topology import complete
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.local import Local
from edgegossip.data.partition import IID
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.net.address import Address
from edgegossip.real.join import Connection, join
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.process import one_intra_op_thread

NOBODY = "tcp/127.0.0.1:7446"
"""Where nobody calls."""
SHORT_EPOCH = 2000
"""Samples: of an epoch that takes longer than there is time nothing would be known."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The pieces to measure.

    Args:
        rank: Of the worker.
        only: The algorithm.
        go: Begins when this file exists.
        train_seconds: How long to train.
    """

    rank: Rank
    only: str | None = None
    go: Path
    train_seconds: Seconds = 30.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """How fast the hosts are while all of them train.

    Attributes:
        throughputs: Samples per second of each.
        paces: Seconds that a step of the pace took meanwhile on the core of each.
    """

    throughputs: list[float]
    paces: list[float]

    @property
    def samples_per_step(self) -> list[float]:
        """How many each host trains while its core does a step of the pace."""
        return [a * b for a, b in zip(self.throughputs, self.paces, strict=True)]


def throughput(experiment: Experiment, options: Options) -> float:
    """Samples per second of one worker."""
    task = experiment.task
    alone = replace(
        experiment,
        task=replace(task, dataset=_own(experiment, options.rank), partition=IID()),
        algorithm=_without_neighbors(experiment.algorithm),
        platforms=experiment.platforms[:1],
        max_seconds=options.train_seconds,
    )
    _wait(options)
    with tempfile.TemporaryDirectory() as folder:
        join(alone, 0, out=folder, connection=Connection(address=Address(listen=(NOBODY,))))
        lines = (Path(folder) / "events.jsonl").read_text().splitlines()
    trained = [event for event in map(json.loads, lines) if event["type"] == "trained"]
    if len(trained) < 2:
        raise ValueError(
            f"this host trained fewer than two blocks in {options.train_seconds} s; raise "
            "train_seconds in lab/calibrate.py"
        )
    first, *others = trained  # which has got ready, too
    return float(sum(event["cost"] for event in others) / (trained[-1]["time"] - first["time"]))


def _own(experiment: Experiment, rank: Rank) -> Dataset:
    """The data that a worker trains on."""
    task, ranks, own = experiment.task, experiment.data_ranks, experiment.task.dataset
    if isinstance(own, Local):
        own = own.of(rank)
        assert own.validation is not None
        own = replace(own, test=own.validation, validation=None)
        shard = torch.arange(len(own.train))
    else:
        shards = task.partition(own, len(ranks), experiment.seed)
        # A server has no data of its own.
        shard = shards[ranks.index(rank) if rank in ranks else 0]
    if isinstance(experiment.algorithm, EpochGossip):
        shard = shard[:SHORT_EPOCH]
    return replace(own, train=ArraySplit(*own.train.batch(shard)))


def _without_neighbors(algorithm: Algorithm[Any]) -> Algorithm[Any]:
    if isinstance(algorithm, EdgeGossip):
        return replace(algorithm, inner=_without_neighbors(algorithm.inner))
    if isinstance(algorithm, ParameterServer | Standby | Shards):
        return GoSGD(topology=complete(1), num_rounds=10**9)
    assert isinstance(algorithm, EpochGossip | GoSGD | Gossip)
    return replace(algorithm, topology=complete(1), num_rounds=10**9)


def _wait(options: Options) -> None:
    print("ready", flush=True)
    while not options.go.exists():
        time.sleep(0.01)


def main() -> None:
    command = parse_recipe("worker", Options, sys.argv[1:])
    options = command.options
    keep_freed_memory()
    with one_intra_op_thread():
        print(throughput(command.call.experiment(options.only), options))


if __name__ == "__main__":
    main()
