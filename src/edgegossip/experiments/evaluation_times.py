"""Times at which a simulated run looks whether an evaluation is due."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from edgegossip.core.protocol import Rank, Seconds
from edgegossip.experiments.experiment import Experiment


def check_interval(experiment: Experiment, shards: Mapping[Rank, Sized]) -> Seconds:
    """Virtual seconds between two checks for a due evaluation.

    Args:
        experiment: The experiment.
        shards: Samples of each worker that has some.
    """
    if experiment.evaluation_interval is not None:
        return experiment.evaluation_interval
    if experiment.evaluation_epochs is not None:
        # It cannot be due sooner than if nobody ever waited.
        num_samples = len(experiment.task.dataset.train)
        throughput = sum(each.total_throughput for each in experiment.platforms)
        return experiment.evaluation_epochs * num_samples / throughput / 4
    epochs = [
        len(shard) / experiment.platforms[rank].total_throughput
        for rank, shard in shards.items()
    ]
    return max(epochs) / 4
