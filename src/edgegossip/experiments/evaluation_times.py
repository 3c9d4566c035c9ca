"""Times at which a simulated run checks whether an evaluation is due."""

from __future__ import annotations

from edgegossip.core.protocol import Seconds
from edgegossip.experiments.experiment import Experiment
from edgegossip.learning.task import Workload


def check_interval(experiment: Experiment, workload: Workload) -> Seconds:
    """Virtual seconds between two checks of whether an evaluation is due.

    Args:
        experiment: The experiment.
        workload: Its workload.
    """
    if experiment.evaluation_interval is not None:
        return experiment.evaluation_interval
    if experiment.evaluation_epochs is not None:
        # An evaluation is due soonest if no worker ever waits.
        throughput = sum(each.total_throughput for each in experiment.platforms)
        return experiment.evaluation_epochs * workload.num_train / throughput / 4
    epochs = [
        len(shard) / experiment.platforms[rank].total_throughput
        for rank, shard in workload.shards.items()
    ]
    return max(epochs) / 4
