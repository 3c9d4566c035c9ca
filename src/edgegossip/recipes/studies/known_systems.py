"""The systems in `systems/table`, each with its own setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.double_squeeze import DoubleSqueeze
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.push_sum.sparse_push import SparsePush
from edgegossip.algorithms.server.adsp import ADSP
from edgegossip.algorithms.server.methods import BSP, SSP
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.topology import complete, directed_ring
from edgegossip.contract.trainer import Trainer
from edgegossip.models.blocks import drawn_from
from edgegossip.recipes.push_sum_comparison import compressor
from edgegossip.recipes.studies.server_methods import RATES, Candidate
from edgegossip.recipes.tasks import ACCURACY_AWARE
from edgegossip.training.sampling.accuracy_aware import PLAIN, AccuracyAware
from edgegossip.training.stages.cutting import blocks
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.staged import staged
from edgegossip.training.stages.teachers import Greedy, TeacherFactory
from edgegossip.training.task import Task

WORKERS_AT_MOST = 64
"""Maximum number of batches in the cloud at a time, one from each worker."""

Build = Callable[[int, Any], Algorithm[Any]]


@dataclass(frozen=True, kw_only=True)
class System:
    """A system in the study.

    Args:
        build: Makes the algorithm from the number of workers and the value of its setting.
        option: Name of the setting to tune in addition to the learning rate; empty for none.
        values: Values to try; empty without such a setting.
        has_server: Whether an additional first rank serves and does not train.
        has_cloud: Whether an additional last rank trains the upper part of the model.
        accuracy_aware: Choice of samples; making aggregated points takes time.
    """

    build: Build
    option: str = ""
    values: tuple[float, ...] = ()
    has_server: bool = False
    has_cloud: bool = False
    accuracy_aware: AccuracyAware = PLAIN

    def on(self, task: Task, workers: int, value: float | None) -> tuple[Task, Algorithm[Any]]:
        """Return the task and the algorithm for this many workers."""
        task = replace(task, accuracy_aware=self.accuracy_aware)
        return task, self.build(workers, value)

    def example(self, workers: int) -> Algorithm[Any]:
        """Make the algorithm for any model, with the first value."""
        return self.build(workers, (self.values or (1,))[0])

    def candidates(self) -> Iterator[tuple[str, Candidate]]:
        """Return the candidates by name; see `RATES`."""
        for value in self.values or (None,):
            for lr in RATES:
                own = "" if value is None else f", {self.option} = {value:g}"
                yield f"lr = {lr:g}{own}", Candidate(lr=lr, value=value)


@dataclass(frozen=True, kw_only=True)
class InTwoStages(System):
    """A system with a cloud for the last layer; workers train the other layers.

    Args:
        build: Makes the algorithm from the number of workers and its other arguments.
        stage: Trains a stage.
        teacher: Teacher of the lower stage; None if the true gradient comes back.
    """

    stage: Callable[..., Trainer]
    teacher: TeacherFactory | None = None
    has_cloud: bool = True

    def on(self, task: Task, workers: int, value: float | None) -> tuple[Task, Algorithm[Any]]:
        assert not isinstance(task.model, Mapping)  # the model is whole
        with drawn_from(0):
            num_blocks = len(blocks(task.model()))
        parts = staged(task, (num_blocks - 1,), self.stage, self.teacher)
        found = {"boundaries": parts.boundaries, "num_classes": parts.num_classes}
        # A pass may end with one sample more.
        options = {**_stages(workers), **found, "max_batch": task.batch_size + 1}
        return parts.task, self.build(workers, options)

    def example(self, workers: int) -> Algorithm[Any]:
        some = {"boundaries": ((1,),), "num_classes": 1}
        return self.build(workers, {**_stages(workers), **some})


def _rounds(workers: int) -> dict[str, Any]:
    return {"topology": complete(workers), "num_rounds": UNTIL_CUT_OFF}


def _committers(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "num_rounds": UNTIL_CUT_OFF}


def _stages(workers: int) -> dict[str, Any]:
    inner = EpochGossip(**_rounds(workers))
    return {"inner": inner, "num_first": workers, "precision": "int8"}


SYSTEMS: dict[str, System] = {
    "all-reduce": System(build=lambda n, _: AllReduce(**_rounds(n))),
    "epoch-gossip": System(build=lambda n, _: EpochGossip(**_rounds(n))),
    "gosgd": System(
        build=lambda n, p: GoSGD(**_rounds(n), exchange_probability=p),
        option="p",
        values=(0.01, 0.05, 0.2),
    ),
    "edge-gossip": System(
        build=lambda n, share: EdgeGossip(
            inner=EpochGossip(**_rounds(n)), max_keep_ratio=share
        ),
        option="share of an epoch",
        values=(0.1, 0.3, 1.0),
        accuracy_aware=ACCURACY_AWARE,
    ),
    "diloco": System(
        build=lambda n, steps: DiLoCo(**_rounds(n), local_steps=int(steps)),
        option="local steps",
        values=(8, 32, 128),
    ),
    "double-squeeze": System(
        build=lambda n, steps: DoubleSqueeze(
            **_rounds(n), local_steps=int(steps), compressor=compressor(0.1, 4)
        ),
        option="local steps",
        values=(2, 8, 32),
    ),
    "sparse-push": System(
        build=lambda n, keep: SparsePush(
            topology=directed_ring(n),
            num_rounds=UNTIL_CUT_OFF,
            compressor=compressor(keep, 32),
        ),
        option="share kept",
        values=(0.01, 0.05, 0.1),
    ),
    "bsp": System(build=lambda n, _: BSP(**_committers(n)), has_server=True),
    "ssp": System(
        build=lambda n, slack: SSP(**_committers(n), slack=int(slack)),
        option="s",
        values=(4, 40, 160),
        has_server=True,
    ),
    "adsp": System(
        build=lambda n, window: ADSP(**_committers(n), window=window, min_interval=0.1),
        option="window",
        values=(2.0, 5.0, 10.0),
        has_server=True,
    ),
    "splitfed": InTwoStages(
        build=lambda n, options: Pipelined(**options, in_flight=1),
        stage=partial(PipelinedStage, max_passed=WORKERS_AT_MOST),
    ),
    "greedy-stages": InTwoStages(
        build=lambda n, options: Decoupled(**options, gradient_every=None),
        stage=DecoupledStage,
        teacher=Greedy(),
    ),
}
