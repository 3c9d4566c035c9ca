"""Joining a run over Zenoh, with a monitor, as `edgegossip worker` does."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.machine.counters import SystemCounters
from edgegossip.machine.monitor import Monitor
from edgegossip.machine.predictor import PerformancePredictor
from edgegossip.machine.profile import Profile
from edgegossip.machine.profiling import TimedTraining
from edgegossip.machine.telemetry import Journal, open_telemetry
from edgegossip.net.address import Address
from edgegossip.net.identity.access import bound_name
from edgegossip.net.identity.certificates import parse_serial
from edgegossip.net.identity.tls import load_tls
from edgegossip.net.pacing import bytes_per_second
from edgegossip.net.zenoh.session import LEASE, require_lease
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.executors import ExecutorProcesses, follow, leading, on_device
from edgegossip.real.introduction import run_key
from edgegossip.real.worker import WorkerSettings, take_part
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import require_unlocked
from edgegossip.runs.process import intra_op_threads
from edgegossip.training.executors.lead import Executors
from edgegossip.training.executors.learners import LeadingLearner
from edgegossip.training.sampling.accuracy_aware import PLAIN


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A worker's connection to the other workers.

    Args:
        address: Endpoints at which this worker listens, and to which it connects.
        tls: Folder with ca.pem and this rank's certificate and key; None for plain links.
        ban: Serial numbers, in hex, of certificates to reject.
        insecure: Allow plain links beyond this machine.
        lease: See `ZenohTransport`.
        upload_limit: See `ZenohTransport`.

    Raises:
        ValueError: If `lease` is out of range, `upload_limit` is no rate, or a serial number in
            `ban` is malformed.
    """

    address: Address
    tls: Path | str | None = None
    ban: tuple[str, ...] = ()
    insecure: bool = False
    lease: Seconds = LEASE
    upload_limit: str | None = None

    def __post_init__(self) -> None:
        require_lease(self.lease)
        if self.upload_limit is not None:
            bytes_per_second(self.upload_limit)
        for serial in self.ban:
            parse_serial(serial)

    def transport(
        self, run: str, rank: Rank, num_workers: int, shown: Path | None = None
    ) -> ZenohTransport:
        """Make the transport of worker `rank` in the run with this name.

        Observers may read the log at the path `shown`.

        Raises:
            NetworkError: If a certificate is unusable, or plain links are not allowed.
        """
        # Certificates may be bound to the name that precedes the recipe's.
        security = load_tls(self.tls, rank, [bound_name(run)], self.ban)
        return ZenohTransport(
            run=run,
            rank=rank,
            num_workers=num_workers,
            address=self.address,
            security=security,
            insecure=self.insecure,
            shown=shown,
            lease=self.lease,
            upload_limit=self.upload_limit,
        )


def join(
    experiment: Experiment,
    rank: Rank,
    *,
    out: Path | str,
    connection: Connection,
    settings: WorkerSettings = WorkerSettings(),
    profile: Path | str | None = None,
    telemetry: str = "memory",
    recipe: str | None = None,
    command: str | None = None,
    executors: ExecutorProcesses = ExecutorProcesses(),
) -> str:
    """Run worker `rank` of `experiment` on this machine, until the end of the run.

    This does the same as ``edgegossip worker``, for the caller's own experiment::

        eg.join(
            experiment,
            rank=1,
            out="run/workers/1",
            connection=eg.Connection(
                address=eg.Address(
                    listen=("tls/0.0.0.0:7447",), connect=("tls/first-machine:7447",)
                ),
                tls="certs",
            ),
        )

    Args:
        experiment: The workers' common experiment, equal on all machines.
        rank: Rank of this worker.
        out: Folder of this worker; a restart with the same folder resumes.
        connection: Connection to the other workers.
        settings: Settings of this worker.
        profile: Profile of this machine from `edgegossip profile`; None to learn its speed
            during the run.
        telemetry: Where to store a sample of the machine's load each minute: a .jsonl file, a
            redis:// URL, or "memory".
        recipe: Name of the recipe, for the record.
        command: Command of this worker, for the record.
        executors: Processes of this machine that train each batch together, for
            ``edgegossip worker --executors``. From Python, start them with torchrun: in its
            first process, this function is the worker, and in the others it trains for the
            worker and returns "followed".

    Returns:
        The reason for the end: "finished", "time limit" or "interrupted"; or "followed".

    Raises:
        UsageError: If several executors cannot train this worker.
        NetworkError: If this machine cannot take part, or may not do so without TLS.
        RunFolderError: If `out` cannot be written, has other contents, or is in use.
        TrainingError: If a loss is not finite.
        DataError: If the profile is unusable.
        ValueError: If `rank` is out of range.
        ServerLostError: If the server is lost and does not return in time.
        PlatformError: If too many platforms have failed for the algorithm.
    """
    experiment = on_device(experiment, executors)
    if follow(experiment, rank, settings.threads):
        return "followed"
    require_unlocked(Path(out))  # before seconds of measuring
    run = run_key(experiment, recipe, settings.name)
    transport = connection.transport(
        run, rank, experiment.num_workers, Path(out) / "events.jsonl"
    )
    keep_freed_memory()
    with (
        leading(experiment, rank, executors, settings.threads) as together,
        closing(open_telemetry(telemetry, run)) as store,
    ):
        # Messages are this worker's own traffic, which must not count as load by others.
        counters = SystemCounters(
            lambda: transport.network_bytes, () if together is None else together.process_ids
        )
        alone = seconds_per_sample(
            experiment, rank, threads=settings.threads, executors=together
        )
        number = 1 if together is None else len(together.num_samples)
        predictor = PerformancePredictor(number, seconds_alone=alone and number * alone)
        if profile is not None:
            predictor.fit(Profile.read(profile))
        journal = Journal(store, rank)
        with Monitor(
            predictor, counters=counters, journal=journal, executors=together
        ) as monitor:
            return take_part(
                experiment,
                rank,
                transport,
                out=out,
                settings=settings,
                forecaster=monitor,
                recipe=recipe,
                command=command,
                executors=together,
            )


def seconds_per_sample(
    experiment: Experiment,
    rank: Rank,
    seconds: Seconds = 1.0,
    threads: int = 1,
    executors: Executors | None = None,
) -> Seconds | None:
    """Train for about `seconds`, without effect, and return the time per sample.

    Returns None if no worker with the role of `rank` has data, or if it cannot train alone. The
    first forecast uses this time; later forecasts use measurements. A spare, which has no data
    until another worker of its role fails, is timed on such a worker's data.
    """
    role = experiment.algorithm.role
    alike = [r for r in experiment.data_ranks if role(r).name == role(rank).name]
    if not alike:
        return None
    rank = rank if rank in alike else alike[0]
    task = replace(experiment.task, accuracy_aware=PLAIN)
    workload = replace(experiment, task=task).workload((rank,))
    make = None if executors is None else partial(LeadingLearner, executors=executors)
    trainer = workload.make_trainer(rank, make=make)
    params = workload.initial_params(rank)
    if trainer.trial(params, num_steps=1) is None:
        return None
    training = TimedTraining(trainer, params)
    with intra_op_threads(threads):
        training.run(0.01)  # the first step also makes what later steps use
        start, end, cost = training.run(seconds)
    return (end - start) / cost
