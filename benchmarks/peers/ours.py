"""One turn of edgegossip; the simulator alone, as the peers are without logs and evaluations.

Kinds: `gosgd` pushes the parameters after each pass to a random neighbor on the ring, which is
what gossipy does; `epoch-gossip` averages with both neighbors behind a barrier; `fedavg` is
FixedADACOMM, which averages at a server after each pass, as Flower does. Learners are made, and
the first batches prepared, while the clock runs. Training is batched where `--batched auto`
would do so.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benchmarks.peers.same_task import (
    LEARNING_RATE,
    MOMENTUM,
    Job,
    StopWatch,
    job_from_command_line,
    make_model,
    pictures,
    report,
)
from benchmarks.simulator import warm_up

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.server.methods import FixedADACOMM
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.topology import ring
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.readers import mnist
from edgegossip.models import lenet5, mlp
from edgegossip.models.flat import FlatModel
from edgegossip.recipes.tasks import default_data_dir
from edgegossip.runs.batching import batched
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.platform import uneven
from edgegossip.sim.pool import ComputePool
from edgegossip.sim.simulator import Simulator
from edgegossip.training.optimizer import SGD
from edgegossip.training.task import Task, Workload

SHAPE = (1, 28, 28)
MODELS = {
    "lenet5": partial(lenet5, input_shape=SHAPE, num_classes=10),
    "mlp": partial(mlp, SHAPE, 10),
}


def algorithm(job: Job) -> Algorithm[Any]:
    if job.kind == "fedavg":
        return FixedADACOMM(num_workers=job.workers, num_rounds=job.rounds, tau=job.steps)
    if job.kind == "epoch-gossip":
        return EpochGossip(topology=ring(job.workers), num_rounds=job.rounds)
    return GoSGD(
        topology=ring(job.workers),
        num_rounds=job.rounds,
        local_steps=job.steps,
        exchange_probability=1.0,
    )


def some_of(dataset: Dataset, num_samples: int) -> Dataset:
    x, y = dataset.train.batch(torch.arange(num_samples))
    return replace(dataset, train=ArraySplit(x, y))


def require_same_layers(job: Job) -> None:
    """The peers' model is ours, layer by layer."""
    theirs, own = (str(make()) for make in (partial(make_model, job), MODELS[job.model]))
    if theirs != own:
        raise SystemExit(f"the models differ: {theirs} is not {own}; repair same_task.py")


def main() -> None:
    job = job_from_command_line()
    require_same_layers(job)
    task = Task(
        dataset=some_of(mnist(default_data_dir()), job.samples),
        model=MODELS[job.model],
        batch_size=job.batch_size,
        optimizer=SGD(lr=LEARNING_RATE, momentum=MOMENTUM),
    )
    chosen = algorithm(job)
    num_ranks = job.workers + (job.kind == "fedavg")
    experiment = batched(
        Experiment(task=task, algorithm=chosen, platforms=uneven(num_ranks)), job.batched
    )
    ranks = [rank for rank in range(num_ranks) if chosen.role(rank).has_data]
    workload = Workload(experiment.task, ranks, seed=0, role=chosen.role)
    torch.set_num_threads(job.threads)
    warm_up()
    with ComputePool() as pool:
        watch = StopWatch()
        simulator = Simulator(
            chosen,
            experiment.platforms,
            workload.initial_params(),
            workload.make_trainer,
            pool=pool,
        )
        simulator.run()
        watch.stop()
    params = torch.stack([*simulator.estimates().values()]).mean(0)
    report(job, watch, loss_of(job, params))


def loss_of(job: Job, params: torch.Tensor) -> float:
    x, y = pictures(job.samples)
    model = FlatModel(MODELS[job.model]())
    with torch.inference_mode():
        model.load(params)
        return torch.nn.functional.cross_entropy(model.module(x[:1000]), y[:1000]).item()


if __name__ == "__main__":
    main()
