"""One of the processes that run the same script, each as a worker with its own data."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Subset

from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import Interrupted, RunFolderError, UsageError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_rank
from edgegossip.models.shared import group_of
from edgegossip.net.address import Address
from edgegossip.net.memory import MemoryNetwork
from edgegossip.net.transport import Transport
from edgegossip.net.zenoh.session import LEASE
from edgegossip.real.join import Connection
from edgegossip.real.launch import free_ports, killed_by, worker_processes
from edgegossip.real.training_loop import TrainingLoop

AlgorithmOrMaker: TypeAlias = Algorithm[Any] | Callable[[int, int], Algorithm[Any]]
"""An algorithm, or a function that makes it from the numbers of workers and optimizer steps."""
_PREFIX = "EDGEGOSSIP_"
_MASTER_PORT = "PET_MASTER_PORT"
"""Variable that gives torchrun the value of its option --master-port."""
_WORKER = ("RANK", "NUM_WORKERS", "NAME")
_CONNECTION = (
    *("LISTEN", "CONNECT", "MULTICAST", "TLS", "BAN", "INSECURE"),
    *("LEASE", "UPLOAD_LIMIT"),
)


@dataclass(frozen=True, kw_only=True)
class ScriptWorker:
    """A process of a script that takes part in a run; by default, it trains alone.

    Args:
        rank: Rank of this process.
        num_workers: Number of all processes, on all machines.
        connection: Connection to the other processes; needed if there are any.
        name: Name of the run, equal for all processes.
        transport: Alternative to `connection`, for threads of one process.

    Raises:
        ValueError: If `rank` is out of range, or there is no connection to the other processes.
    """

    rank: Rank = 0
    num_workers: int = 1
    connection: Connection | None = None
    name: str = "script"
    transport: Transport | None = None

    def __post_init__(self) -> None:
        check_rank(self.rank, self.num_workers)
        if self.num_workers > 1 and self.connection is None and self.transport is None:
            raise ValueError(
                f"one of {self.num_workers} workers needs a connection to the others; give it "
                "connection=edgegossip.Connection(address=...)"
            )

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> ScriptWorker:
        """Read this process's worker from the variables that `edgegossip script` sets.

        The variables are EDGEGOSSIP_RANK, EDGEGOSSIP_NUM_WORKERS, EDGEGOSSIP_NAME, and the
        `Connection`: EDGEGOSSIP_LISTEN and EDGEGOSSIP_CONNECT (endpoints, separated by spaces),
        EDGEGOSSIP_MULTICAST and EDGEGOSSIP_INSECURE (1 or 0), EDGEGOSSIP_TLS (a folder),
        EDGEGOSSIP_BAN (serial numbers, separated by spaces), EDGEGOSSIP_LEASE (seconds) and
        EDGEGOSSIP_UPLOAD_LIMIT (such as 10mbit).
        Without the first two, the worker is alone.

        Raises:
            UsageError: If only one of the first two is set, or any variable is invalid.
        """
        found = {name: variables.get(_PREFIX + name, "") for name in _WORKER + _CONNECTION}
        if not found["RANK"] and not found["NUM_WORKERS"]:
            return cls()
        try:
            is_alone = found["NUM_WORKERS"] == "1" and not any(map(found.get, _CONNECTION))
            connection = None if is_alone else _connection(found)
            return cls(
                rank=_whole(found["RANK"], "RANK"),
                num_workers=_whole(found["NUM_WORKERS"], "NUM_WORKERS"),
                connection=connection,
                name=found["NAME"] or cls.name,
            )
        except ValueError as error:
            raise UsageError(
                f"{error}; start the script with `edgegossip script`, or set the variables "
                f"{_PREFIX}RANK, {_PREFIX}NUM_WORKERS, {_PREFIX}LISTEN and {_PREFIX}CONNECT"
            ) from None

    def environment(self) -> dict[str, str]:
        """The variables from which `from_environment` makes this worker."""
        found = dict.fromkeys(_CONNECTION, "")  # nothing of another worker's is inherited
        found |= {"RANK": str(self.rank), "NUM_WORKERS": str(self.num_workers)}
        if (connection := self.connection) is not None:
            found |= {
                "LISTEN": " ".join(connection.address.listen),
                "CONNECT": " ".join(connection.address.connect),
                "MULTICAST": "1" if connection.address.multicast else "",
                "TLS": "" if connection.tls is None else str(Path(connection.tls).resolve()),
                "BAN": " ".join(connection.ban),
                "INSECURE": "1" if connection.insecure else "",
                "LEASE": str(connection.lease),
                "UPLOAD_LIMIT": connection.upload_limit or "",
            }
        return {_PREFIX + name: value for name, value in {**found, "NAME": self.name}.items()}

    def own_share(self, samples: Any) -> Any:  # noqa: ANN401
        """This worker's part of a data set: every `num_workers`-th sample.

        All workers get equally many samples; the remainder, fewer than `num_workers` samples,
        is omitted. Data sets with a `shard` method (Hugging Face) are sharded without
        omissions.

        Args:
            samples: A tensor, a map-style PyTorch data set, or a Hugging Face data set.

        Raises:
            TypeError: If `samples` has no length, or cannot be indexed by number.
        """
        if self.num_workers == 1:
            return samples
        if hasattr(samples, "shard"):
            return samples.shard(num_shards=self.num_workers, index=self.rank, contiguous=False)
        if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise TypeError(
                f"{type(samples).__name__} cannot be indexed by number, so no worker can take "
                "its share; let the script use worker.rank and worker.num_workers"
            )
        n = self.num_workers
        own = range(self.rank, len(samples) // n * n, n)
        if isinstance(samples, Tensor):
            return samples[own.start : own.stop : n]
        return samples.select(own) if hasattr(samples, "select") else Subset(samples, own)

    def training_loop(
        self,
        model: nn.Module,
        algorithm: AlgorithmOrMaker,
        *,
        num_samples: int,
        num_steps: int = 0,
        **options: Any,  # noqa: ANN401
    ) -> TrainingLoop:
        """Make this worker's loop.

        If the worker trains in several processes, which all have the same rank here, only the
        one of rank 0 in their group opens a connection; see `TrainingLoop`.

        Args:
            model: Model that the script trains.
            algorithm: The algorithm, equal for all workers; or a function that makes it from
                the numbers of workers and steps, such as ``lambda n, steps:
                Gossip(topology=ring(n), num_rounds=steps)``.
            num_samples: Number of this worker's samples, in all its processes together.
            num_steps: Optimizer steps that the script will take; used if `algorithm` is a
                function.
            options: Other arguments of `TrainingLoop`. `final_average` is true by default.

        Raises:
            ValueError: If the algorithm is for a different number of workers; see also
                `TrainingLoop`.
        """
        n = self.num_workers
        made = algorithm if isinstance(algorithm, Algorithm) else algorithm(n, num_steps)
        options = {"final_average": True, "name": self.name, **options}
        group = group_of(model, options.get("process_group"))
        follows = group is not None and dist.get_rank(group) > 0
        transport = None if follows else self._transport()
        return TrainingLoop(
            model, made, self.rank, n, transport, num_samples=num_samples, **options
        )

    def _transport(self) -> Transport:
        if self.transport is not None:
            return self.transport
        connection = self.connection
        if connection is None or self.num_workers == 1:
            return MemoryNetwork().transport(self.rank)
        return connection.transport(self.name, self.rank, self.num_workers)


def script_worker() -> ScriptWorker:
    """This process's worker; see `ScriptWorker.from_environment`."""
    return ScriptWorker.from_environment()


def own_share(samples: Any) -> Any:  # noqa: ANN401
    """This process's part of a data set; see `ScriptWorker.own_share`."""
    return script_worker().own_share(samples)


def _connection(found: Mapping[str, str]) -> Connection:
    """Read a connection from the values of the variables `_CONNECTION`."""
    address = Address(
        listen=tuple(found["LISTEN"].split()),
        connect=tuple(found["CONNECT"].split()),
        multicast=_flag(found["MULTICAST"], "MULTICAST"),
    )
    return Connection(
        address=address,
        tls=found["TLS"] or None,
        ban=tuple(found["BAN"].split()),
        insecure=_flag(found["INSECURE"], "INSECURE"),
        lease=_seconds(found["LEASE"], "LEASE") if found["LEASE"] else LEASE,
        upload_limit=found["UPLOAD_LIMIT"] or None,
    )


def _flag(text: str, name: str) -> bool:
    if text not in ("", "0", "1"):
        raise ValueError(f"{_PREFIX}{name} must be 1 or 0, got {text!r}")
    return text == "1"


def _seconds(text: str, name: str) -> Seconds:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{_PREFIX}{name} must be a number of seconds, got {text!r}") from None


def _whole(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{_PREFIX}{name} must be a whole number, got {text!r}")
    return int(text)


def local_workers(num_workers: int, name: str, lease: Seconds = LEASE) -> list[ScriptWorker]:
    """Workers that reach each other over free ports of this machine."""
    endpoints = [f"tcp/127.0.0.1:{port}" for port in free_ports(num_workers)]
    addresses = (
        Address(listen=(own,), connect=tuple(each for each in endpoints if each != own))
        for own in endpoints
    )
    return [
        ScriptWorker(
            rank=rank,
            num_workers=num_workers,
            connection=Connection(address=address, lease=lease),
            name=name,
        )
        for rank, address in enumerate(addresses)
    ]


def run_script(
    script: Sequence[str], workers: Sequence[ScriptWorker], out: Path
) -> dict[Rank, str | None]:
    """Run a script once for each of `workers`, and wait for all processes.

    The first worker writes to this terminal, the others to `out`/worker-R.txt.

    Args:
        script: File and arguments of the script; or a program and its arguments, such as
            ``torchrun``, which starts several processes of a worker.
        workers: The workers of this machine.
        out: Folder for the other workers' output, made if there are other workers.

    Returns:
        The ranks whose process failed, with the signal that killed it, in words; None if it
        ended by itself.

    Raises:
        UsageError: If there is no such program.
        Interrupted: After Ctrl+C, SIGTERM or SIGHUP; each signal reaches the processes as
            Ctrl+C.
        RunFolderError: If `out` cannot be written.
    """
    program, arguments = sys.executable, [*script]
    if not script[0].endswith(".py"):
        program, arguments = _found(script[0]), [*script[1:]]
    # Two launchers of PyTorch on one machine would both listen on its usual port.
    ports = free_ports(len(workers)) if len(workers) > 1 else []
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(worker_processes(signal.SIGINT))
        for worker, port in itertools.zip_longest(workers, ports):
            output = None if worker is workers[0] else stack.enter_context(_log(out, worker))
            environment = worker.environment()
            if port is not None:
                environment[_MASTER_PORT] = str(port)
            started.start(worker.rank, arguments, output, environment, program)
        processes = started.processes
        failed = {rank: killed_by(each) for rank, each in processes.items() if each.wait()}
    if started.is_stopping:
        raise Interrupted("interrupted; the workers have left the run")
    return failed


def _found(program: str) -> str:
    """The path of a program, preferably from this Python's environment."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(program, path=beside) or shutil.which(program)
    if found is None:
        raise UsageError(
            f"there is no program {program!r}; give a script FILE.py, or a command that starts "
            "one, such as torchrun --nproc-per-node 2 FILE.py"
        )
    return found


def _log(out: Path, worker: ScriptWorker) -> IO[bytes]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        return log_path(out, worker.rank).open("wb")
    except OSError as error:
        raise RunFolderError(
            f"cannot write {out}: {error.strerror}; choose another --out"
        ) from error


def log_path(out: Path, rank: Rank) -> Path:
    """Path of the output of a worker that does not write to the terminal."""
    return out / f"worker-{rank}.txt"
