"""One turn of gossipy (`gossipy-dfl`); runs in an environment that has it.

Its own protocol: in a round every node pushes its model to a random neighbor on the ring, which
averages it with its own and trains one epoch (MERGE_UPDATE). Nodes are made, and trained once
as `init_nodes` does, before the clock starts. Nothing is evaluated.
"""

from __future__ import annotations

import importlib.machinery
import logging
import sys
import types

import numpy as np
import torch
import torch.nn.functional as F
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


def without_torchvision() -> None:
    """gossipy imports it, for data sets that are not needed here."""
    stub = types.ModuleType("torchvision")
    stub.__spec__ = importlib.machinery.ModuleSpec("torchvision", None)
    sys.modules["torchvision"] = stub


without_torchvision()

from gossipy.core import AntiEntropyProtocol, CreateModelMode, StaticP2PNetwork  # noqa: E402
from gossipy.data import DataDispatcher  # noqa: E402
from gossipy.data.handler import ClassificationDataHandler  # noqa: E402
from gossipy.model import TorchModel  # noqa: E402
from gossipy.model.handler import TorchModelHandler  # noqa: E402
from gossipy.node import GossipNode  # noqa: E402
from gossipy.simul import GossipSimulator  # noqa: E402

ROUND_LENGTH = 100


class Net(TorchModel):  # type: ignore[misc]
    """Our layers in its class."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.layers = make_model(job)

    def init_weights(self) -> None:
        """Keep those of PyTorch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return "Net"


def ring(num_nodes: int) -> np.ndarray:
    edges = np.eye(num_nodes, k=1) + np.eye(num_nodes, k=1 - num_nodes)
    return edges + edges.T


def simulator(job: Job) -> GossipSimulator:
    x, y = pictures(job.samples, is_channels_last=job.is_channels_last)
    data = DataDispatcher(
        ClassificationDataHandler(x, y, test_size=0), n=job.workers, eval_on_user=False
    )
    handler = TorchModelHandler(
        net=Net(job),
        optimizer=torch.optim.SGD,
        optimizer_params={"lr": LEARNING_RATE, "momentum": MOMENTUM},
        criterion=F.cross_entropy,
        batch_size=job.batch_size,
        create_model_mode=CreateModelMode.MERGE_UPDATE,
    )
    network = StaticP2PNetwork(job.workers, topology=ring(job.workers))
    nodes = GossipNode.generate(data, network, handler, ROUND_LENGTH, sync=True)
    made = GossipSimulator(nodes, data, ROUND_LENGTH, AntiEntropyProtocol.PUSH)
    made.init_nodes()
    return made


def mean_loss(made: GossipSimulator, job: Job) -> float:
    x, y = pictures(job.samples, is_channels_last=job.is_channels_last)
    with torch.inference_mode():
        losses = [
            F.cross_entropy(node.model_handler.model(x[:1000]), y[:1000])
            for _, node in zip(range(8), made.nodes.values(), strict=False)
        ]
    return float(torch.stack(losses).mean())


def main() -> None:
    job = job_from_command_line()
    logging.disable(logging.WARNING)
    torch.set_num_threads(job.threads)
    made = simulator(job)
    watch = StopWatch()
    made.start(n_rounds=job.rounds)
    watch.stop()
    report(job, watch, mean_loss(made, job))


if __name__ == "__main__":
    main()
