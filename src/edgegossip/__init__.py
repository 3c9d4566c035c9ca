"""Train one PyTorch model together on machines of very different speed.

Every public name can be had from here. They are imported when first used, so that
``edgegossip --help`` does not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgegossip.algorithms.all_reduce import AllReduce
    from edgegossip.algorithms.epoch_gossip import EpochGossip
    from edgegossip.algorithms.gosgd import GoSGD
    from edgegossip.algorithms.gossip import Gossip
    from edgegossip.core.topology import complete, ring

_HOMES = {
    "algorithms.all_reduce": ["AllReduce"],
    "algorithms.epoch_gossip": ["EpochGossip"],
    "algorithms.gosgd": ["GoSGD"],
    "algorithms.gossip": ["Gossip"],
    "core.errors": ["DataError", "EdgeGossipError", "RunFolderError", "TrainingError"],
    "core.metrics": ["consensus_distance"],
    "core.mixing": [
        "ColumnStochastic",
        "MetropolisHastings",
        "Uniform",
        "mixing_matrix",
        "spectral_gap",
    ],
    "core.topology": [
        "complete",
        "directed_exponential",
        "directed_ring",
        "from_edges",
        "one_peer_exponential",
        "random_regular",
        "ring",
        "star",
        "torus",
    ],
    "experiments.comparison": ["compare"],
    "experiments.experiment": ["Comparison", "Experiment"],
    "experiments.results": ["Evaluation", "Results"],
    "experiments.runner": ["Interrupted", "run"],
    "learning.augmentation": ["flip_and_crop"],
    "learning.dataset": ["ArraySplit", "Dataset", "from_torch"],
    "learning.dropout": ["Dropout"],
    "learning.evaluator": ["Evaluator"],
    "learning.learner": ["Learner"],
    "learning.optimizer": ["SGD"],
    "learning.partition": ["IID", "BySubject", "Dirichlet", "LabelSkew", "Proportional"],
    "learning.readers": [
        "cifar10",
        "digits",
        "downsampled_imagenet",
        "fashion_mnist",
        "har",
        "huggingface",
        "mnist",
        "npz",
    ],
    "learning.task": ["Task"],
    "report.page": ["write_report"],
    "sim.fault": ["Crash", "Delay", "Drop", "Faults", "Partition", "Recover"],
    "sim.link": ["Link", "Links"],
    "sim.platform": ["Contention", "ContentionTrace", "Platform", "paper", "uneven"],
    "sim.simulator": ["Simulator"],
    "sim.traces": ["gpus", "phones"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'edgegossip' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"edgegossip.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
