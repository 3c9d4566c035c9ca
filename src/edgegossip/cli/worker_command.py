"""The commands that train on real machines. Importing this module imports torch."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from edgegossip.cli.command import Command, parse_recipe, recipe_name
from edgegossip.cli.commands import print_report, print_table, warn_of, write_report
from edgegossip.cli.options import ConnectionOptions, KeepOptions, TrackOptions
from edgegossip.cli.printing import TIMED, LogOptions, log_to_console, warn
from edgegossip.contract.errors import Interrupted, UsageError, require_extra
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.data.local import Local
from edgegossip.integrations.trackers import trackers
from edgegossip.net.host.meeting import workers
from edgegossip.net.pacing import bytes_per_second
from edgegossip.real.agreement import is_apart
from edgegossip.real.executors import ExecutorProcesses
from edgegossip.real.gather import AVERAGED, MEASURED, gather, measure
from edgegossip.real.gathering import WORKERS
from edgegossip.real.join import join
from edgegossip.real.launch import launch, lost_workers
from edgegossip.real.metrics_server import MetricsAddress, metrics_address
from edgegossip.real.worker import WorkerSettings
from edgegossip.recipes.call import RecipeCall, option_words
from edgegossip.report import units
from edgegossip.report.live import LiveView
from edgegossip.report.watching import WatchServer
from edgegossip.runs.describe import rank_name
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.files import read_json
from edgegossip.runs.fit import misfits_of_launch
from edgegossip.runs.process import one_intra_op_thread
from edgegossip.runs.results import Results
from edgegossip.runs.tracking import Tracker, track_results

EXIT_APART = 3
"""Exit code of a real run whose workers end with different models."""
_OF_LAUNCH = ("out", "resume", "n", "track", "executors", "metrics", "watch")
"""Options of `launch` that are not passed on to its workers as they are."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(WorkerSettings, ConnectionOptions, TrackOptions, KeepOptions, LogOptions):
    """Options of one worker.

    Args:
        rank: Rank of this worker, from 0.
        only: Algorithm to run if the recipe is a comparison; by default its baseline.
        out: Folder of this worker; a restart with the same folder resumes. By default
            runs/NAME/STAMP.
        profile: CSV file from `edgegossip profile`, which improves forecasts from the start.
        telemetry: Where to store a sample of this machine's load each minute: a .jsonl file, a
            redis:// URL, or memory. Put the password into EDGEGOSSIP_REDIS_PASSWORD, because
            other users of this machine can see the URL.
        executors: Processes that train each batch together, on this machine and as one worker:
            their number, or their devices, e.g. cuda:0,cuda:1.
        trackers: Not an option; `track` names them.
    """

    rank: Rank
    only: str | None = None
    out: Path | None = None
    profile: Path | None = None
    telemetry: str = "memory"
    executors: str = "1"
    trackers: tyro.conf.Suppress[tuple[Tracker, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(TrackOptions, KeepOptions, LogOptions):
    """Options for starting all workers on this machine.

    Args:
        n: Number of workers, or of stages: short for the recipe's --num-workers or
            --num-stages.
        only: Algorithm to run if the recipe is a comparison; by default its baseline.
        out: Run folder; by default runs/NAME/STAMP.
        resume: Resume the interrupted run in `out`.
        max_seconds: Time limit, counted from the beginning; by default the recipe's.
        checkpoint_seconds: Seconds between checkpoints.
        max_waiting_bytes: Limit on each worker's messages in memory; see `edgegossip worker`.
        upload_limit: Rate of all that each worker sends, such as 10mbit; by default what its
            links carry.
        final_average: At the end, give all workers in reach the mean of their models; see
            `edgegossip worker`.
        executors: Executors of each worker that trains; see `edgegossip worker`.
        metrics: PORT or HOST:PORT of worker 0's metrics; worker R has PORT + R. See
            `edgegossip worker`.
        watch: Serve a page that shows the run, for this machine only, and print its address;
            see `edgegossip watch`.
    """

    n: Annotated[int | None, tyro.conf.arg(name="n", aliases=("-n",))] = None
    only: str | None = None
    out: Path | None = None
    resume: bool = False
    max_seconds: Seconds | None = None
    checkpoint_seconds: Seconds = 60.0
    max_waiting_bytes: int | None = None
    upload_limit: str | None = None
    final_average: bool = True
    executors: str = "1"
    metrics: str | None = None
    watch: bool = False

    def __post_init__(self) -> None:
        ExecutorProcesses(devices=self.executors)
        check_ranges(self, max_waiting_bytes="at least 1 or None")
        if self.upload_limit is not None:
            bytes_per_second(self.upload_limit)
        if self.metrics is not None:
            metrics_address(self.metrics)


@dataclass(frozen=True, kw_only=True)
class GatherOptions(TrackOptions, KeepOptions):
    """Options for combining the workers' folders into one run folder.

    Args:
        out: Run folder, which contains worker R's folder as workers/R.
        only: Algorithm that was run, if the recipe is a comparison; by default its baseline.
        without: Ranks whose own data is excluded from the results; their measurements are not
            awaited.
        open: The run was open (`edgegossip worker --open`), so some workers may never have been
            there.
    """

    out: Path
    only: str | None = None
    without: tuple[Rank, ...] = ()
    open: bool = False


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Options for measuring averaged models on the data of one worker.

    Args:
        rank: Rank of the worker whose data is on this machine.
        out: Run folder; the models are read from its folder averaged, and the results are
            written to its folder measured.
        only: Algorithm that was run, if the recipe is a comparison; by default its baseline.
    """

    rank: Rank
    out: Path
    only: str | None = None


def worker_command(arguments: list[str]) -> int:
    """`edgegossip worker`."""
    command = parse_recipe("worker", WorkerOptions, arguments)
    options = command.options
    run = options.name or command.call.name
    log_to_console(logging.INFO, TIMED, options, run=run, rank=options.rank)
    experiment = _experiment_of(command)
    _check_rank(options.rank, experiment.num_workers)
    out = options.out or command.default_folder
    try:
        connection = options.connection()
        start = ("-m", "edgegossip", "worker", *arguments)
        executors = ExecutorProcesses(devices=options.executors, command=start)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        reason = join(
            experiment,
            options.rank,
            out=out,
            connection=connection,
            settings=replace(options, trackers=trackers(options.track)),
            profile=options.profile,
            telemetry=options.telemetry,
            recipe=command.call.name,
            command=command.record,
            executors=executors,
        )
    except KeyboardInterrupt:  # before the run, or asked twice
        reason = "interrupted"
    if reason == "followed":
        return 0  # the lead of the executors reports
    print(f"{rank_name(experiment.roles, options.rank)}: {reason}")
    if reason == "interrupted":
        raise Interrupted(f"stopped; to continue: {command.line(out=out)}")
    if options.parent is None:
        gather = ["gather", *_same_for_all(command), *_kept(options)]
        return _say_what_came_out(out, gather, experiment.task.metric)
    return 0  # the launcher finds out from the folders whether the models agree


def _check_rank(rank: Rank, num_workers: int) -> None:
    """Raise UsageError if the run has no such worker."""
    if not 0 <= rank < num_workers:
        raise UsageError(
            f"--rank must be in 0..{num_workers - 1}, got {rank}; the run has {num_workers} "
            "workers, set by --num-workers or the recipe"
        )


def _experiment_of(command: Command[Any, RecipeCall]) -> Experiment:
    """The experiment of a real run.

    Raises:
        UsageError: If an argument does not apply to it.
    """
    options = command.options
    experiment: Experiment = options.applied_to(command.call.experiment(options.only))
    command.call.require_used(experiment)
    return experiment


def _same_for_all(command: Command[Any, RecipeCall]) -> list[str]:
    """The recipe and its arguments, and `--only`, which are the same for all workers."""
    only = command.options.only
    return [*command.call.words(), *([] if only is None else option_words("only", only))]


def _kept(options: WorkerOptions) -> list[str]:
    """The options of the best model and of an open run, which a gathering needs as well."""
    given = {"keep": options.keep, "patience": options.patience}
    words = [w for name, x in given.items() if x is not None for w in option_words(name, x)]
    return [*words, "--open"] if options.open else words


def _say_what_came_out(out: Path, gather: Sequence[str], metric: MetricSpec = ACCURACY) -> int:
    """Print this worker's result and the command that gathers; return the exit code."""
    found = read_json(out / "summary.json")
    value, commits = found[f"validation_{metric.key}"], found["commits"]
    shown = f", validation {metric.name} {units.metric_value(value, metric, 2)}"
    reached = "" if value is None else shown
    made = "" if commits is None else f"{commits:,} commits, "
    print(
        f"{found['rounds']:,} rounds in {units.seconds(found['seconds'])}, {made}"
        f"{units.data_size(found['bytes_sent'])} sent{reached}; its model and log are in {out}"
    )
    run = out.parent.parent if out.parent.name == WORKERS else Path("RUN")
    print(
        f"next, to measure the averaged model: copy the folders of all workers to "
        f"{run / WORKERS / '0'}, {run / WORKERS / '1'}, ... and run\n"
        f"  edgegossip {shlex.join([*gather, '--out', str(run)])}"
    )
    if not is_apart(found):
        return 0
    warn("the model of this worker is not the run's; see the warnings above")
    return EXIT_APART


_NUMBERS = ("num_workers", "num_stages")
"""Arguments that `-n` may set: the first of these that the recipe has."""


def _with_number(arguments: list[str]) -> tuple[list[str], str | None]:
    """Replace `-n` with the recipe's own option; also return its name, None if there is none.

    Raises:
        UsageError: If both options are given.
    """
    given = [each for each in arguments[1:] if each.partition("=")[0] in ("-n", "--n")]
    known = RecipeCall(arguments[0]).defaults if given else {}
    name = next((each for each in _NUMBERS if each in known), None)
    if name is None:
        return arguments, None
    option = "--" + name.replace("_", "-")
    if option in (each.partition("=")[0].replace("_", "-") for each in arguments):
        raise UsageError(f"-n sets {option}; give one of them")
    replaced = {each: option + "".join(each.partition("=")[1:]) for each in given}
    return [replaced.get(each, each) for each in arguments], name


def _check_number(name: str, wanted: int | None, sets: str | None, num_workers: int) -> None:
    """Check that `-n` has set what it should.

    Args:
        name: Name of the recipe.
        wanted: Number that no argument of the recipe could take; None if there is none.
        sets: The argument that has taken it.
        num_workers: Number of workers of the run.

    Raises:
        UsageError: If the run has another number of workers, or no stages.
    """
    if wanted not in (None, num_workers):
        raise UsageError(
            f"{name} has {num_workers} workers, and no argument {' or '.join(_NUMBERS)} that "
            f"-n {wanted} could set; leave out -n"
        )
    if sets == "num_stages" and num_workers == 1:
        raise UsageError(
            "-n sets the number of stages, but this run has the whole model on one "
            "machine; choose one in stages with --only"
        )


def _ports(metrics: str | None, num_workers: int) -> MetricsAddress | None:
    """Worker 0's address for metrics, which leaves ports for all others; None without one."""
    if metrics is None:
        return None
    require_extra("--metrics", "prometheus_client", "metrics")
    try:
        metrics_address(metrics).plus(num_workers - 1)
    except ValueError as error:
        raise UsageError(
            f"--metrics needs a port for each of {num_workers} workers: {error}"
        ) from error
    return metrics_address(metrics)


def launch_command(arguments: list[str]) -> int:
    """`edgegossip launch`."""
    recipe_name("launch", LaunchOptions, arguments)
    arguments, number = _with_number(arguments)
    command = parse_recipe("launch", LaunchOptions, arguments)
    options, name = command.options, command.call.name
    log_to_console(options=options, run=name)
    _check_resumed(options)
    _, *passed_on = command.words(*_OF_LAUNCH)

    def worker(
        rank: Rank, endpoint: str, others: Sequence[str], folder: Path, ended: Sequence[Rank]
    ) -> list[str]:
        whose = ["--rank", str(rank), "--out", str(folder), "--parent", str(os.getpid())]
        network = ["--listen", endpoint, "--connect", *others, "--ended", *map(str, ended)]
        is_shared = options.executors != "1" and rank in experiment.data_ranks
        shared = ["--executors", options.executors] if is_shared else []
        shown = [] if served is None else ["--metrics", str(served.plus(rank))]
        return ["worker", *passed_on, *whose, *network, *shared, *shown]

    out = options.out or command.default_folder
    experiment = _experiment_of(command)
    _check_number(name, options.n, number, experiment.num_workers)
    served = _ports(options.metrics, experiment.num_workers)
    warn_of(misfits_of_launch(experiment.num_workers))
    page = _page(out) if options.watch else nullcontext()
    with page, LiveView() as view, one_intra_op_thread(), command.how_to_resume(out):
        results = launch(
            experiment,
            worker,
            out=out,
            resume=options.resume,
            recipe=name,
            command=command.record,
            progress=view,
            trackers=options.trackers,
            make_measure=partial(_measuring, command, out),
            max_seconds=options.max_seconds,
        )
    print_table({experiment.run_name: results})
    print_report(write_report(out))
    code = _say_who_disagrees(results.disagreements)
    return 1 if lost_workers(experiment, out) else code


def _measuring(command: Command[Any, RecipeCall], out: Path, rank: Rank) -> list[str]:
    return ["measure", *_same_for_all(command), "--rank", str(rank), "--out", str(out)]


def _check_resumed(options: LaunchOptions) -> None:
    if options.resume and (options.out is None or not options.out.is_dir()):
        raise UsageError("--resume needs --out DIR, the folder of what was interrupted")


@contextmanager
def _page(out: Path) -> Iterator[None]:
    """Serve the page of the run in `out` within the block."""
    with WatchServer(out.resolve()) as server:
        print(f"watch: the run is at {server.url}", flush=True)
        yield


def _say_who_disagrees(disagreements: Sequence[str]) -> int:
    """Print a line for each difference of the final models; return the exit code."""
    for line in disagreements:
        warn(f"the models differ: {line}")
    return EXIT_APART if disagreements else 0


def gather_command(arguments: list[str]) -> int:
    """`edgegossip gather`."""
    log_to_console()
    command = parse_recipe("gather", GatherOptions, arguments)
    options, name = command.options, command.call.name
    experiment = _experiment_of(command)
    chosen = options.trackers  # before anything is written: a package may be missing
    with one_intra_op_thread():
        results, left_out = gather(
            experiment, options.out, name, options.without, is_open=options.open
        )
    if not isinstance(results, Results):
        _say_who_measures(options.out, ["measure", *_same_for_all(command)], results)
        return 0
    track_results(results, chosen)
    for line in left_out:
        warn(line)
    print_table({experiment.run_name: results})
    print_report(write_report(options.out))
    return _say_who_disagrees(results.disagreements)


def _say_who_measures(out: Path, command: Sequence[str], ranks: Sequence[Rank]) -> None:
    """Print the steps with which workers measure averaged models on their own data."""
    rank = "R" if len(ranks) > 1 else str(ranks[0])
    have, their = ("have", "their") if len(ranks) > 1 else ("has", "its")
    print(
        f"{workers(ranks)} {have} models to measure, on {their} own data:\n"
        f"  1. copy {out / AVERAGED} to the machine of each, and run there\n"
        f"     edgegossip {shlex.join([*command, '--rank', rank, '--out', str(out)])}\n"
        f"  2. copy its {out / MEASURED}/{rank}.json here, and gather again"
    )


def measure_command(arguments: list[str]) -> int:
    """`edgegossip measure`."""
    log_to_console()
    command = parse_recipe("measure", MeasureOptions, arguments)
    options = command.options
    experiment = command.call.experiment(options.only)
    if not isinstance(experiment.task.dataset, Local):
        raise UsageError(
            f"{command.call.name} has no Local data, so `edgegossip gather` measures it all"
        )
    with one_intra_op_thread():
        number = measure(experiment, options.rank, options.out)
    print(f"worker {options.rank} has measured {number} models; see {options.out / MEASURED}")
    return 0
