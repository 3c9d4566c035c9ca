"""Options that several commands have."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import tyro

from edgegossip.contract.errors import UsageError
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.ranges import check_range
from edgegossip.data.hold_out import hold_out
from edgegossip.data.local import Local
from edgegossip.data.partition import BySubject
from edgegossip.integrations.ray_runs import RayRuns
from edgegossip.integrations.trackers import TrackerName, trackers
from edgegossip.machine.quota import num_cores
from edgegossip.net.address import Address
from edgegossip.net.zenoh.session import LEASE
from edgegossip.real.join import Connection
from edgegossip.runs.best import KeepBest
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for results.

    Args:
        out: Folder of the results; by default runs/NAME/STAMP.
        resume: Resume the interrupted work in `out`; the result is the same as without the
            interruption.
        threads: Threads of the compute pool; by default one per core. No effect on results.
    """

    out: Path | None = None
    resume: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.out == Path():
            raise ValueError("out must be a folder of its own, got an empty name or '.'")
        if self.threads is not None:
            check_range("threads", self.threads, "at least 0")
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out DIR, the folder of the interrupted work")


@dataclass(frozen=True, kw_only=True)
class TrackOptions:
    """Options for trackers.

    Args:
        track: Also show the numbers in other programs: tensorboard, wandb (offline), mlflow,
            trackio.
    """

    track: tuple[TrackerName, ...] = ()

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """The named trackers, with their default settings."""
        return trackers(self.track)


_held_out = lru_cache(maxsize=1)(hold_out)
"""`hold_out`, with one copy of the samples for all runs of a comparison."""


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """Options for the best model.

    Args:
        keep: best also keeps the averaged model that is best on validation data: those of the
            recipe, or a tenth of the training samples (of the subjects, if they are known),
            which is then not trained on.
        patience: Number of evaluations in a row without a better model after which the run
            ends; needs `--keep best`.
    """

    keep: Literal["best"] | None = None
    patience: int | None = None

    def applied_to(self, experiment: Experiment) -> Experiment:
        """The experiment with these options; unchanged without them.

        Raises:
            UsageError: If an option is out of range, or the data is too small to hold any out.
        """
        if self.keep is None:
            if self.patience is not None:
                raise UsageError("--patience is for --keep best; give both")
            return experiment
        task, dataset = experiment.task, experiment.task.dataset
        try:
            if dataset.validation is None and not isinstance(dataset, Local):
                # Subjects cannot be both held out and one worker each.
                is_by_subject = dataset.subjects is not None and task.partition != BySubject()
                task = replace(task, dataset=_held_out(dataset, by_subject=is_by_subject))
            return replace(experiment, task=task, keep=KeepBest(patience=self.patience))
        except ValueError as error:
            raise UsageError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class ManyRunsOptions(Options):
    """Options for several runs.

    Args:
        processes: Number of parallel runs, each with one thread in its own process; by default
            one per core, or 1 with `--threads`. No effect on results.
    """

    processes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("processes", self.processes, "at least 1 or None")

    @property
    def num_processes(self) -> int:
        """Number of parallel runs: as given, or one per core; 1 if only `threads` is given."""
        return self.processes or (1 if self.threads is not None else num_cores())


def check_ray_address(pool: str, ray_address: str | None) -> None:
    """Raise ValueError if an address is given without `--pool ray`."""
    if ray_address is not None and pool != "ray":
        raise ValueError("--ray-address is for --pool ray; give both")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(ManyRunsOptions):
    """Options for several runs, here or on a cluster.

    Args:
        pool: Where runs are carried out: in processes here, or on the cores of a Ray cluster,
            at most `--processes` at once. No effect on results.
        ray_address: HOST:PORT of this machine's Ray cluster, or auto; by default Ray is started
            on this machine alone and ends with the command.
    """

    pool: Literal["processes", "ray"] = "processes"
    ray_address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ray_address(self.pool, self.ray_address)
        if self.pool == "ray" and self.threads is not None:
            raise ValueError("--pool ray gives each run one core; leave out --threads")

    @property
    def at_once(self) -> RayRuns | None:
        """Carries out runs on the requested cluster; None for processes here."""
        return None if self.pool == "processes" else RayRuns(self.ray_address, self.processes)


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Options for the connection of one worker.

    Args:
        listen: Endpoint at which other workers reach this one, e.g. tls/0.0.0.0:7447; port 0
            chooses a free port. With --tls, a worker may leave it out only behind a router.
        connect: Endpoint of another worker or a router, e.g. tls/server:7447.
        multicast: Also look for workers on the local network.
        tls: Folder with ca.pem and this rank's certificate; see `edgegossip certs`. Changes to
            these files and to revoked.pem take effect at once.
        ban: Serial number of a further certificate to reject; repeatable.
        insecure: Allow plain links beyond this machine; anybody can then read messages and
            join.
        lease: Seconds after which a link is closed if it is silent.
        upload_limit: Rate of all that this worker sends, such as 10mbit or 500kbit; by default
            what its links carry.
    """

    listen: tuple[str, ...] = ()
    connect: tuple[str, ...] = ()
    multicast: bool = False
    tls: Path | None = None
    ban: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    insecure: bool = False
    lease: Seconds = LEASE
    upload_limit: str | None = None

    def connection(self) -> Connection:
        """The connection.

        Raises:
            ValueError: If an option is malformed, or there is no way to any other worker.
        """
        return Connection(
            address=Address(listen=self.listen, connect=self.connect, multicast=self.multicast),
            tls=self.tls,
            ban=self.ban,
            insecure=self.insecure,
            lease=self.lease,
            upload_limit=self.upload_limit,
        )

    def of_the_connection(self) -> list[str]:
        """The options of the connection that differ from their defaults."""
        ours = fields(ConnectionOptions)
        given = [each.name for each in ours if getattr(self, each.name) != each.default]
        return [f"--{name.replace('_', '-')}" for name in given]
