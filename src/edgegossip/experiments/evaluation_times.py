"""Times at which a simulated run checks whether an evaluation is due."""

from __future__ import annotations

from edgegossip.core.protocol import Seconds
from edgegossip.experiments.experiment import Experiment
from edgegossip.learning.task import Workload


def check_interval(experiment: Experiment, workload: Workload) -> Seconds:
    """Virtual seconds between two checks for a due evaluation.

    Args:
        experiment: The experiment.
        workload: Its workload.
    """
    if experiment.evaluation_interval is not None:
        return experiment.evaluation_interval
    if experiment.evaluation_epochs is not None:
        # It is due no sooner than if no worker ever waited.
        throughput = sum(each.total_throughput for each in experiment.platforms)
        return experiment.evaluation_epochs * workload.num_train / throughput / 4
    epochs = [
        len(shard) / experiment.platforms[rank].total_throughput
        for rank, shard in workload.shards.items()
    ]
    return max(epochs) / 4
