"""The executors of a worker on real machines: its own processes, or those of torchrun."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import is_torchelastic_launched
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_range
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.machine.quota import num_cores
from edgegossip.machine.system import own_group
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.process import intra_op_threads, on_stop_signal
from edgegossip.training.executors.follower import Follower
from edgegossip.training.executors.lead import Executors
from edgegossip.training.executors.learners import FollowingLearner
from edgegossip.training.executors.links import LOOPBACK, ExecutorLostError, Place
from edgegossip.training.learner import Learner

_LOG = logging.getLogger("edgegossip.real")
_OURS = "edgegossip"
"""Run ID in the environment of executors that a worker has started, where torchrun has its."""
_MEETING = timedelta(seconds=300)
_ENDING: Seconds = 10.0
"""Seconds after which an executor that has not ended is killed."""


@dataclass(frozen=True, kw_only=True)
class ExecutorProcesses:
    """The executors of one worker: processes of this machine, the first of which is the worker.

    Args:
        devices: Number of executors, or their devices, such as "cuda:0,cuda:1". A number of
            executors with torch_device "cuda" gives each a GPU.
        command: Arguments of Python that start another executor, which calls `follow`.

    Raises:
        ValueError: If `devices` is neither a number of at least 1 nor a list of devices.

    >>> ExecutorProcesses(devices="cuda:0,cuda:1").torch_device("cpu", 1)
    'cuda:1'
    """

    devices: str = "1"
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if re.fullmatch(r"-?\d+", self.devices):
            check_range("executors", int(self.devices), "at least 1")
            return
        for name in self._names:
            try:
                torch.device(name)
            except RuntimeError as error:
                raise ValueError(
                    f"executors must be a number, or devices such as cuda:0,cuda:1, got "
                    f"{self.devices!r}; {name!r} is no device"
                ) from error

    @property
    def _names(self) -> list[str]:
        is_number = self.devices.isdecimal()
        return [] if is_number else [each.strip() for each in self.devices.split(",")]

    @property
    def number(self) -> int:
        """Number of executors."""
        return len(self._names) or int(self.devices)

    def torch_device(self, default: str, index: int) -> str:
        """Device of the executor `index`; `default` is the task's."""
        if self._names:
            return self._names[index]
        return f"cuda:{index}" if default == "cuda" and self.number > 1 else default


# The environment, as torchrun makes it.


@dataclass(frozen=True)
class Started:
    """The place of a process that torchrun, or a worker, has started, from its environment.

    Attributes:
        index: Index of this process among all executors.
        local_index: Index among those of this machine.
        number: Number of executors.
        is_ours: Whether a worker has started it, rather than torchrun.
    """

    index: int
    local_index: int
    number: int
    is_ours: bool

    @classmethod
    def found(cls) -> Started | None:
        """Read the environment; None if this process is a worker with one executor."""
        number = int(os.environ.get("WORLD_SIZE", "1"))
        if not is_torchelastic_launched() or number == 1:
            return None
        return cls(
            index=int(os.environ["RANK"]),
            local_index=int(os.environ.get("LOCAL_RANK", "0")),
            number=number,
            is_ours=os.environ["TORCHELASTIC_RUN_ID"] == _OURS,
        )

    def place(self) -> Place:
        """Meet the other executors' store.

        Raises:
            NetworkError: If the store cannot be reached.
        """
        try:
            store, _, _ = next(rendezvous("env://", timeout=_MEETING))
        except RuntimeError as error:
            raise NetworkError(
                f"the other executors cannot be reached: {error!s:.200}"
            ) from error
        is_local = os.environ.get("LOCAL_WORLD_SIZE", str(self.number)) == str(self.number)
        host = LOOPBACK if is_local else os.environ["MASTER_ADDR"]
        # torchrun keeps its store when it starts all processes again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Place(self.index, self.number, PrefixStore(f"executors {attempt}", store), host)


def _environment(index: int, number: int, port: int) -> Mapping[str, str]:
    """The environment of an executor that this process starts; the store is here."""
    numbers = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": number, "MASTER_PORT": port}
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **{name: str(value) for name, value in numbers.items()},
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": LOOPBACK,
        "TORCHELASTIC_RUN_ID": _OURS,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


# The worker, which is the lead.


@contextmanager
def leading(
    experiment: Experiment,
    rank: Rank,
    processes: ExecutorProcesses = ExecutorProcesses(),
    threads: int = 1,
) -> Iterator[Executors | None]:
    """Start the other executors of worker `rank`, and end them with the block.

    If torchrun has started this process, the others are there already.

    Args:
        experiment: Experiment of the worker, with the device of the lead.
        rank: Rank of the worker.
        processes: The executors to start.
        threads: Threads of each executor.

    Yields:
        The executors; None if there is only one.

    Raises:
        UsageError: If several executors cannot train this worker.
    """
    started = Started.found()
    number = processes.number if started is None else started.number
    if number == 1:
        yield None
        return
    require_sharing(experiment, rank, number)
    torch_device = torch.device(experiment.task.torch_device)
    with ExitStack() as stack:
        if started is not None:
            executors = Executors(started.place(), torch_device)
        else:
            if torch_device.type == "cpu" and number * threads > num_cores():
                _LOG.warning(
                    "%d executors need as many cores%s, but this process may use %d; they slow "
                    "each other down",
                    number,
                    f" for each of {threads} threads" if threads > 1 else "",
                    num_cores(),
                )
            store, others = stack.enter_context(_running(number, processes.command))
            executors = Executors(
                Place(0, number, store),
                torch_device,
                may_start=lambda index: others[index - 1].poll() is None,
            )
        # Closed before the processes are awaited, which end when their connection does.
        stack.enter_context(closing(executors))
        _LOG.info("worker %d has %d executors", rank, len(executors.members))
        yield executors


@contextmanager
def _running(
    number: int, command: Sequence[str]
) -> Iterator[tuple[Store, list[subprocess.Popen[bytes]]]]:
    """Start all executors but the first; they end with the block."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=_MEETING)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(1, number):
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                env=_environment(index, number, store.port),
                # Ctrl+C must reach the lead only, which ends the others.
                **own_group(),
            )
            processes.append(process)
        yield PrefixStore("executors 0", store), processes
    finally:
        for process in processes:
            try:
                process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def require_sharing(experiment: Experiment, rank: Rank, number: int) -> None:
    """Check that several executors can train worker `rank` together.

    Raises:
        UsageError: If they cannot.
    """
    role = experiment.algorithm.role(rank)
    if rank not in experiment.data_ranks:
        raise UsageError(
            f"worker {rank} is a {role.name} without data, which {number} executors cannot "
            "train; leave out --executors"
        )
    is_part = bool(experiment.task.part(role.name))
    if is_part or experiment.task.trainer is not Learner:
        what = "holds a part of a model" if is_part else "has a trainer of its own"
        raise UsageError(
            f"worker {rank} {what}, and {number} executors share only the whole model of a "
            "Learner; leave out --executors"
        )


# The others.


def on_device(experiment: Experiment, processes: ExecutorProcesses) -> Experiment:
    """The experiment with the device of this executor.

    Raises:
        UsageError: If the device cannot be used, or if torchrun has started the executors and
            `processes` describes others.
    """
    started, default = Started.found(), experiment.task.torch_device
    if started is None or started.is_ours:
        own = 0 if started is None else started.index
        names = [processes.torch_device(default, index) for index in range(processes.number)]
    elif processes.devices != "1":
        raise UsageError(
            f"torchrun has started {started.number} executors; leave out --executors"
        )
    else:
        own, names = 0, [f"cuda:{started.local_index}" if default == "cuda" else default]
    if {*names} == {default}:
        return experiment
    try:
        # All of them, because an executor that cannot start counts as lost.
        tasks = [replace(experiment.task, torch_device=name) for name in names]
    except ValueError as error:
        raise UsageError(str(error)) from error
    return replace(experiment, task=tasks[own])


def follow(experiment: Experiment, rank: Rank, threads: int = 1) -> bool:
    """If this process is another executor than the lead, follow the lead until it ends.

    Returns:
        Whether this process has followed; if not, it is the lead.

    Raises:
        NetworkError: If the lead cannot be reached.
        UsageError: If several executors cannot train this worker.
    """
    started = Started.found()
    if started is None or started.index == 0:
        return False
    require_sharing(experiment, rank, started.number)
    place = started.place()
    keep_freed_memory()  # as the lead does
    # The lead decides when to stop, and it gives the same warnings.
    with (
        on_stop_signal(lambda: None),
        intra_op_threads(threads),
        warnings.catch_warnings(action="ignore"),
    ):
        learner = experiment.workload((rank,)).make_trainer(rank, make=FollowingLearner)
        assert isinstance(learner, FollowingLearner)
        try:
            with closing(Follower(learner, place)) as follower:
                follower.run()
        except ExecutorLostError as error:
            raise NetworkError(str(error)) from error
    return True
