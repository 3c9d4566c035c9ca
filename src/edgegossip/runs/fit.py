"""Warnings before a run that does not fit on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from edgegossip.contract.algorithm import Wrapper
from edgegossip.contract.rounds import RoundBased
from edgegossip.machine.quota import num_cores
from edgegossip.runs.experiment import Experiment

MANY_MESSAGES = 100_000
"""Messages of one exchange above which a simulated run takes very long."""
_COPIES = 3
"""Vectors of parameters that a simulated worker has at least: its model, momentum, messages."""
PER_CORE = 4
"""Processes per core above which the speeds of real workers say little."""
PROCESS_BYTES = 3e8
"""Memory that a real worker's process shares with no other: PyTorch, mostly (measured)."""


def misfits_of_simulation(experiment: Experiment) -> Iterator[str]:
    """Yield a sentence for each reason why the simulated run may not fit, with a remedy."""
    number, topology = experiment.num_workers, experiment.algorithm.traits.topology
    algorithm = experiment.algorithm
    while isinstance(algorithm, Wrapper):
        algorithm = algorithm.inner
    # Others send to a few of their neighbors at a time.
    if topology is not None and isinstance(algorithm, RoundBased):
        messages = sum(topology.out_degree(rank, 0) for rank in range(number))
        if messages > MANY_MESSAGES:
            yield (
                f"{experiment.run_name}: {number:,} workers send {messages:,} messages in "
                "each exchange, which may take hours; take fewer --num-workers, or an "
                "algorithm on a sparse graph, such as gossip on a ring or gosgd"
            )
    num_params = experiment.workload(()).num_params(0)
    needed, there = 4 * _COPIES * num_params * number, psutil.virtual_memory().available
    if needed > there:
        yield (
            f"{experiment.run_name}: the models of {number:,} workers with {num_params:,} "
            f"parameters need at least {needed / 1e9:.1f} GB, of which {there / 1e9:.1f} GB "
            "are free; take fewer --num-workers, or a smaller model"
        )


def misfits_of_launch(num_processes: int) -> Iterator[str]:
    """Yield a sentence for each reason why real workers may not fit, with a remedy."""
    cores, there = num_cores(), psutil.virtual_memory().available
    if num_processes > PER_CORE * cores:
        yield (
            f"{num_processes} processes share {cores} cores, so workers mostly wait for the "
            "processor, and measured times say little; launch fewer, or simulate them with "
            "edgegossip run"
        )
    if (needed := PROCESS_BYTES * num_processes) > there:
        yield (
            f"{num_processes} processes need about {needed / 1e9:.1f} GB, and "
            f"{there / 1e9:.1f} GB are free; launch fewer, or simulate them with edgegossip run"
        )
