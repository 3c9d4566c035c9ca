"""Traffic of a run relative to uncompressed push-sum."""

from __future__ import annotations

from dataclasses import dataclass

from edgegossip.core.topology import CompleteTopology, Topology
from edgegossip.experiments.experiment import Experiment
from edgegossip.experiments.results import Results


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes sent and samples processed by a run.

    Attributes:
        bytes_sent: Bytes sent by all workers.
        samples_processed: Samples processed by all workers.
        num_workers: Number of workers.
        out_degree: Mean number of receivers of a worker in a round; None without a topology.
    """

    bytes_sent: int
    samples_processed: int
    num_workers: int
    out_degree: float | None

    @property
    def per_worker(self) -> float:
        """Mean bytes sent per worker."""
        return self.bytes_sent / self.num_workers

    @property
    def per_sample(self) -> float:
        """Bytes sent by all workers per training sample; 0 before there are any."""
        return self.bytes_sent / self.samples_processed if self.samples_processed else 0.0

    def times_less_than(self, dense: Traffic) -> float | None:
        """Bytes of `dense` per sample, divided by this run's; None if this run sent nothing."""
        return dense.per_sample / self.per_sample if self.per_sample else None

    def ratios(self, dense: Traffic | None) -> dict[str, float | None]:
        """Ratios of dense push-sum's bytes for the same number of samples to this run's bytes.

        The run `dense` sends one message to each out-neighbor after each step, which gives the
        bytes of a message per sample. Dense push-sum sends `out_degree` such messages on this
        run's graph, and ``num_workers - 1`` on the complete graph.

        >>> dense = Traffic(
        ...     bytes_sent=800, samples_processed=10, num_workers=8, out_degree=1.0
        ... )
        >>> Traffic(
        ...     bytes_sent=20, samples_processed=10, num_workers=8, out_degree=1.0
        ... ).ratios(dense)
        {'bytes_ratio_same_graph': 40.0, 'bytes_ratio_complete_graph': 280.0}

        Args:
            dense: Traffic of the dense run; None if it is unfinished or not planned.
        """
        same = complete = None
        less = None if dense is None else self.times_less_than(dense)
        if dense is not None and dense.out_degree and less:
            per_neighbor = less / dense.out_degree
            complete = per_neighbor * (self.num_workers - 1)
            same = None if self.out_degree is None else per_neighbor * self.out_degree
        return {"bytes_ratio_same_graph": same, "bytes_ratio_complete_graph": complete}


def traffic(experiment: Experiment, results: Results) -> Traffic:
    """Traffic of a run up to its last evaluation."""
    topology = experiment.algorithm.traits.topology
    last = results.history[-1]
    return Traffic(
        bytes_sent=last.bytes_sent,
        samples_processed=last.samples_processed,
        num_workers=experiment.num_workers,
        out_degree=None if topology is None else mean_out_degree(topology),
    )


def mean_out_degree(topology: Topology) -> float:
    """Mean number of receivers of a worker in a round.

    >>> from edgegossip.core.topology import ring, star
    >>> mean_out_degree(ring(8)), mean_out_degree(star(4))
    (2.0, 1.5)
    """
    if isinstance(topology, CompleteTopology):  # all degrees are equal
        return topology.num_workers - 1.0
    degrees = [
        topology.out_degree(rank, round)
        for round in range(topology.period)
        for rank in range(topology.num_workers)
    ]
    return sum(degrees) / len(degrees)
