"""A small language model on uneven machines, each with the books of one author."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.topology import complete, ring
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.partition import IID, BySubject
from edgegossip.data.texts import books
from edgegossip.models import gpt
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.tasks import default_data_dir
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.sim.link import Links
from edgegossip.sim.platform import Platform, uneven
from edgegossip.training.loss import TokenCrossEntropy, next_token
from edgegossip.training.metrics import BitsPerCharacter, Perplexity
from edgegossip.training.task import Task

NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    """Settings of a language model.

    Args:
        num_epochs: Passes of the slowest worker over an even share of the data; all runs take
            this long.
        num_workers: Number of workers, each on its own platform.
        mixed: Assign the pieces of text at random, instead of one author to each worker.
        throughput: Training samples per second of the fastest platform.
        batch_size: Samples per step and worker.
        local_steps: Steps between two messages of DiLoCo.
        lr: Learning rate of AdamW.
        context: Length of a sample, in bytes.
        width: Size of an embedding.
        num_layers: Number of transformer blocks.
        num_heads: Heads of each attention layer.
        num_test: Maximum number of test samples, evenly spaced.
        num_evaluations: Number of evaluations of each run.
        seed: Seeds the random choices.
        torch_device: Device of the models: auto, cpu, cuda, cuda:1 or mps. "auto" takes
            the first of cuda, mps and cpu that a machine has.

    Raises:
        ValueError: If a number is out of range.
    """

    num_epochs: float = 1.0
    num_workers: int = 8
    mixed: bool = False
    throughput: float = 80.0
    batch_size: int = 16
    local_steps: int = 50
    lr: float = 1e-3
    context: int = 128
    width: int = 128
    num_layers: int = 5
    num_heads: int = 4
    num_test: int = 1000
    num_evaluations: int = 20
    seed: int = 0
    torch_device: str = "cpu"

    def __post_init__(self) -> None:
        check_ranges(self, num_epochs="above 0 and finite", throughput="above 0 and finite")
        check_ranges(self, lr="above 0 and finite", num_test="at least 1")
        check_ranges(self, num_evaluations="at least 1", num_workers="at least 1")


BOOKS = LanguageSettings()


def books_gpt(
    settings: LanguageSettings = BOOKS,
    *,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Books of eight authors, a GPT of a million parameters, 8 uneven platforms: hours.

    The runs are DiLoCo, EdgeGossip around it, Gossip on a ring and AllReduce, measured in bits
    per character on the last tenth of each author's text.

    EdgeGossip scales each worker's steps between two messages of DiLoCo by the worker's
    relative speed, so all workers end a round together. Authors' texts differ in length by a
    factor of up to nine; `--mixed` gives all workers equal amounts.

    Args:
        settings: Settings of the recipe.
        data_dir: Folder with books/*.txt, one file per author; by default $EDGEGOSSIP_DATA.
    """
    number = settings.num_workers
    task = language_task(books(data_dir, settings.context), settings)
    platforms = uneven(number, settings.throughput)
    seconds = slowest_seconds(settings, task, platforms)
    everyone: dict[str, Any] = {"topology": complete(number), "num_rounds": UNTIL_CUT_OFF}
    diloco = DiLoCo(**everyone, local_steps=settings.local_steps)
    algorithms: dict[str, Algorithm[Any]] = {
        "diloco": diloco,
        "edge-diloco": EdgeGossip(inner=diloco),
        "gossip": Gossip(topology=ring(number), num_rounds=UNTIL_CUT_OFF),
        "all-reduce": AllReduce(**everyone),
    }
    return Comparison(
        experiments={
            name: Experiment(
                task=task,
                algorithm=algorithm,
                platforms=platforms,
                links=Links(default=HOME_LINK),
                seed=settings.seed,
                max_seconds=seconds,
                evaluation_interval=seconds / settings.num_evaluations,
            )
            for name, algorithm in algorithms.items()
        },
        baseline="diloco",
    )


def slowest_seconds(
    settings: LanguageSettings, task: Task, platforms: tuple[Platform, ...]
) -> Seconds:
    """Seconds that the slowest platform needs for `num_epochs` passes over an even share."""
    slowest = min(platform.total_throughput for platform in platforms)
    return settings.num_epochs * len(task.dataset.train) / len(platforms) / slowest


def language_task(dataset: Dataset, settings: LanguageSettings) -> Task:
    """Make the task of predicting the next byte of a text, with AdamW.

    Args:
        dataset: Pieces of text, as from `texts`.
        settings: Settings of the model and the optimizer.
    """
    number = min(settings.num_test, len(dataset.test))
    some = torch.linspace(0, len(dataset.test) - 1, number).long()
    return Task(
        dataset=replace(dataset, test=ArraySplit(dataset.test.batch(some))),
        model=partial(
            gpt,
            num_tokens=NUM_BYTES,
            context=settings.context,
            width=settings.width,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
        ),
        forward=next_token,
        loss=TokenCrossEntropy(),
        metrics=(BitsPerCharacter(), Perplexity()),
        optimizer=partial(torch.optim.AdamW, lr=settings.lr),
        batch_size=settings.batch_size,
        partition=IID() if settings.mixed else BySubject(),
        torch_device=settings.torch_device,
    )
