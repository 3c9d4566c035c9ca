"""A machine that has joined a run whose algorithm is not chosen yet: it measures, and waits.

Importing this module imports torch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgegossip.cli.command import parse_recipe
from edgegossip.cli.worker_command import WorkerOptions
from edgegossip.contract.errors import EdgeGossipError, NetworkError, UsageError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.data.partition import IID, Shared
from edgegossip.net.address import Address
from edgegossip.net.identity.enrollment import RefusedError
from edgegossip.net.identity.joined import JoinedRun, certificates
from edgegossip.net.link_meter import LinkMeter
from edgegossip.plan.rehearsal import PART, Costs, Rehearsal, costs
from edgegossip.real.join import Connection, join
from edgegossip.real.worker import WorkerSettings
from edgegossip.runs.events import EventReader
from edgegossip.runs.experiment import Experiment
from edgegossip.sim.fault import Faults
from edgegossip.training.sampling.accuracy_aware import PLAIN

_POLL: Seconds = 0.3
_PATIENCE: Seconds = 600.0
"""Time for which the machine that plans may be away."""
_MAX_SECONDS: Seconds = 60.0
_MEETING: Seconds = 20.0
_MOST_OF_LINK = 0.5
"""Share of the slowest link that the messages of a rehearsal use."""
_SHORTEST: Seconds = 0.1
"""Shortest time between two of them."""


def await_plan(
    run: JoinedRun, folder: Path, recipe: str, address: Address, further: Sequence[str]
) -> JoinedRun | None:
    """Measure when the machine that plans asks for it, and return the planned run.

    The signing service tells what to do, over a connection on which it proves to own the run's
    authority; nobody else can start this machine.

    Args:
        run: The run, which is not decided.
        folder: Its folder, which then has the planned run.
        recipe: The recipe as this machine names it.
        address: Where this machine listens, and the routers to which it connects.
        further: Further options of this machine's worker.

    Returns:
        The planned run; None if the person who plans has decided not to start.

    Raises:
        NetworkError: If this machine is refused, or the machine that plans is away for long.
        UsageError: If this worker's task cannot be timed.
    """
    words = [recipe, *run.words[1:], "--rank", str(run.rank), *further]
    command = parse_recipe("worker", WorkerOptions, words)
    experiment = command.call.experiment(command.options.only)
    num_bytes = _model_bytes(experiment, run.rank)
    connection = Connection(
        address=address,
        tls=certificates(folder),
        lease=command.options.lease,
        upload_limit=command.options.upload_limit,
    )
    worker = _Rehearsing(run, experiment, num_bytes, connection, command.options.threads)
    with ExitStack() as stack:

        def open_meter() -> LinkMeter:
            transport = connection.transport(f"{run.run}:plan", run.rank, run.num_workers)
            return stack.enter_context(LinkMeter(transport, num_bytes))

        meter = open_meter()

        def measured(task: dict[str, Any]) -> dict[str, Any]:
            nonlocal meter
            if task["do"] == "link":
                return {"link": asdict(meter.measure(int(task["to"])))}
            stack.close()  # the rehearsal listens at the same address
            try:
                return {"costs": asdict(worker.costs(task))}
            finally:
                meter = open_meter()  # a desk that is restarted measures all again

        print("waiting for the plan of this run; this machine measures when asked", flush=True)
        answer = _Questions(run, folder).until_decided(measured)
    if answer["do"] == "end":
        print(f"nothing is started: {answer.get('reason')}")
        return None
    return _planned(run, folder, answer)


class _Questions:
    """The questions of a machine for its next instruction, and its reports.

    Args:
        run: The run.
        folder: Its folder.
    """

    def __init__(self, run: JoinedRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._answered = time.monotonic()

    def until_decided(
        self, measured: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Carry out instructions; return the one that ends the survey."""
        report: dict[str, Any] = {}
        while (answer := self._ask(report))["do"] not in ("start", "end"):
            report = {}
            if answer["do"] == "wait":
                time.sleep(_POLL)
            else:
                try:
                    report = {"id": answer["id"], **_measurement(answer, measured)}
                except KeyboardInterrupt:
                    self._stop(answer)
                    raise
        return answer

    def _stop(self, task: dict[str, Any]) -> None:
        """Tell that this machine leaves a rehearsal, which the others would wait for."""
        if task["do"] == "work":
            report = {"id": task["id"], "failed": "it was stopped"}
            with suppress(NetworkError):  # the answer is a refusal
                self._run.ask(self._folder, "next", digest=self._run.digest, **report)

    def _ask(self, report: dict[str, Any]) -> dict[str, Any]:
        while True:
            try:
                answer = self._run.ask(self._folder, "next", digest=self._run.digest, **report)
                if isinstance(answer.get("do"), str):
                    self._answered = time.monotonic()
                    return answer
                raise NetworkError("the machine that plans gives no instruction")
            except RefusedError:
                raise
            except NetworkError as error:
                if time.monotonic() - self._answered > _PATIENCE:
                    raise NetworkError(
                        f"{error}; when it is back, repeat "
                        f"`edgegossip join --out {self._folder}`"
                    ) from error
                time.sleep(_POLL)


def _measurement(
    task: dict[str, Any], measured: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    if task["do"] not in ("link", "work"):
        return {"failed": f"it does not know {task['do']!r:.20}; install the same version"}
    try:
        return measured(task)
    except EdgeGossipError as error:
        return {"failed": str(error)}


@dataclass(frozen=True)
class _Rehearsing:
    """This machine in the rehearsal.

    Args:
        run: The run.
        experiment: An experiment of the recipe.
        num_bytes: Size of its model.
        connection: Connection to the other machines.
        threads: Threads of one training step.
    """

    run: JoinedRun
    experiment: Experiment
    num_bytes: int
    connection: Connection
    threads: int

    def costs(self, task: dict[str, Any]) -> Costs:
        """Take part in the rehearsal, as a worker in a folder that is removed.

        Raises:
            NetworkError: If the rehearsal cannot take place, or ends early.
        """
        seconds = min(float(task["seconds"]), _MAX_SECONDS)
        between = self.num_bytes / (_MOST_OF_LINK * float(task["rate"]))
        rehearsal = Rehearsal(
            num_workers=self.run.num_workers,
            seconds=seconds,
            message_seconds=max(_SHORTEST, between),
        )
        settings = WorkerSettings(
            name=self.run.run,
            meet_seconds=_MEETING,
            ended=tuple({*range(self.run.num_workers)} - {*map(int, task["present"])}),
            snapshots=False,
            final_average=False,
            threads=self.threads,
        )
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rehearsal"
            reason = join(
                _rehearsed(self.experiment, rehearsal),
                self.run.rank,
                out=out,
                connection=self.connection,
                settings=settings,
            )
            if reason == "interrupted":
                raise KeyboardInterrupt
            notes = EventReader(out / "events.jsonl").notes(PART)
        try:
            return costs(notes)
        except ValueError as error:
            raise NetworkError(str(error)) from error


def _rehearsed(experiment: Experiment, rehearsal: Rehearsal) -> Experiment:
    """The experiment's training as a rehearsal of it."""
    task = replace(experiment.task, accuracy_aware=PLAIN)
    if isinstance(task.partition, Shared):
        task = replace(task, partition=IID())
    return replace(
        experiment,
        algorithm=rehearsal,
        task=task,
        name="rehearsal",
        faults=Faults(),
        until=None,
        keep=None,
        final_average=False,
        max_seconds=None,
    )


def _model_bytes(experiment: Experiment, own: Rank) -> int:
    """The size in bytes of the model of worker `own`, or of another if it has no data.

    Raises:
        UsageError: If the worker cannot train by itself.
    """
    # Local data of another rank may not be on this machine.
    rank = own if own in experiment.data_ranks else experiment.data_ranks[0]
    workload = experiment.workload((rank,))
    params = workload.initial_params(rank)
    if workload.make_trainer(rank).trial(params, num_steps=1) is None:
        raise UsageError(
            "a worker of this recipe trains on what others send, so that it "
            "cannot be timed by itself; plan another recipe"
        )
    return params.numel() * params.element_size()


def _planned(run: JoinedRun, folder: Path, start: dict[str, Any]) -> JoinedRun:
    """The run with what the plan has chosen, written to `folder`.

    Raises:
        NetworkError: If the plan is for another recipe, or incomplete.
    """
    try:
        words, rank = tuple(map(str, start["words"])), int(start["rank"])
        num_workers = int(start["num_workers"])
    except (KeyError, TypeError, ValueError):
        raise NetworkError("the plan is incomplete; install the same version") from None
    if words[:1] != run.words[:1]:
        raise NetworkError(
            f"the plan is for recipe {''.join(words[:1])!r:.60}, and this machine has joined "
            f"for {run.words[0]!r:.60}; nothing is started"
        )
    planned = replace(run, words=words, num_workers=num_workers, kind="planned")
    if rank != run.rank:
        return planned.move(folder, rank)
    planned.write(folder)
    return planned
