"""A machine that has joined a run whose algorithm is not chosen yet: it measures, and waits.

Importing this module imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edgegossip.cli.command import parse_recipe
from edgegossip.cli.worker_command import WorkerOptions
from edgegossip.contract.errors import EdgeGossipError, NetworkError, UsageError
from edgegossip.contract.protocol import Seconds
from edgegossip.machine.profiling import TimedTraining, speeds
from edgegossip.net.address import Address
from edgegossip.net.identity.enrollment import RefusedError
from edgegossip.net.identity.joined import JoinedRun, certificates
from edgegossip.net.link_meter import LinkMeter
from edgegossip.real.join import Connection
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.process import intra_op_threads
from edgegossip.training.sampling.accuracy_aware import PLAIN

_POLL: Seconds = 0.3
_PATIENCE: Seconds = 600.0
"""Time for which the machine that plans may be away."""
_MAX_SPEED: Seconds = 60.0


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
    training, num_bytes = _training(command.call.experiment(command.options.only))
    connection = Connection(
        address=address, tls=certificates(folder), lease=command.options.lease
    )
    transport = connection.transport(f"{run.run}:plan", run.rank, run.num_workers)
    with ExitStack() as stack:
        stack.enter_context(intra_op_threads(command.options.threads))
        meter = stack.enter_context(LinkMeter(transport, num_bytes))
        print("waiting for the plan of this run; this machine measures when asked", flush=True)
        answer = _Questions(run, folder).until_decided(training, meter)
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

    def until_decided(self, training: TimedTraining, meter: LinkMeter) -> dict[str, Any]:
        """Carry out instructions; return the one that ends the survey."""
        report: dict[str, Any] = {}
        while (answer := self._ask(report))["do"] not in ("start", "end"):
            report = {}
            if answer["do"] == "wait":
                time.sleep(_POLL)
            else:
                report = {"id": answer["id"], **_measurement(answer, training, meter)}
        return answer

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
    task: dict[str, Any], training: TimedTraining, meter: LinkMeter
) -> dict[str, Any]:
    try:
        if task["do"] == "speed":
            return {"speeds": speeds(training, min(float(task["seconds"]), _MAX_SPEED))}
        if task["do"] == "link":
            return {"link": asdict(meter.measure(int(task["to"])))}
        return {"failed": f"it does not know {task['do']!r:.20}; install the same version"}
    except EdgeGossipError as error:
        return {"failed": str(error)}


def _training(experiment: Experiment) -> tuple[TimedTraining, int]:
    """Training like that of a worker with data, and the size of its model in bytes.

    Raises:
        UsageError: If it cannot be timed.
    """
    rank = experiment.data_ranks[0]
    task = replace(experiment.task, accuracy_aware=PLAIN)
    workload = replace(experiment, task=task).workload((rank,))
    trainer, params = workload.make_trainer(rank), workload.initial_params(rank)
    if trainer.trial(params, num_steps=1) is None:
        raise UsageError(
            "a worker of this recipe trains on what others send, so that it "
            "cannot be timed by itself; plan another recipe"
        )
    return TimedTraining(trainer, params, max_steps=1), params.numel() * params.element_size()


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
