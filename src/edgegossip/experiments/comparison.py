"""Comparisons: several runs of one task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgegossip.core.errors import Interrupted, RunFolderError
from edgegossip.experiments.at_once import do_at_once
from edgegossip.experiments.experiment import Comparison, throughput_bound
from edgegossip.experiments.files import write_json
from edgegossip.experiments.folder_lock import locked
from edgegossip.experiments.progress import Progress, Silent
from edgegossip.experiments.results import Results
from edgegossip.experiments.run_folder import require_folder
from edgegossip.experiments.runner import run
from edgegossip.experiments.signals import interrupted
from edgegossip.experiments.tracking import Tracker
from edgegossip.experiments.traffic import traffic
from edgegossip.sim.pool import OpenPool


def compare(
    comparison: Comparison,
    *,
    out: Path | str,
    resume: bool = False,
    recipe: str | None = None,
    command: str | None = None,
    num_threads: int | None = None,
    num_processes: int = 1,
    open_pool: OpenPool | None = None,
    progress: Progress | None = None,
    trackers: Sequence[Tracker] = (),
) -> dict[str, Results]:
    """Run every experiment of `comparison`, each in its own folder within `out`.

    ``out/summary.json`` is updated after each run.

    Args:
        comparison: Experiments to run.
        out: Folder, made if missing.
        resume: Read the finished runs in `out`, and resume unfinished ones.
        recipe: Name of the recipe, for the record.
        command: Command line that repeats the comparison, for the record.
        num_threads: Number of threads of the compute pool of each process; None for one per
            core.
        num_processes: Number of parallel runs. With more than one, each has one thread, and the
            experiments must be picklable. No effect on results.
        open_pool: As in `run`, for each run in turn; unused with several processes.
        progress: A live view.
        trackers: Trackers that receive each run's numbers, as in `run`; they are pickled for
            several processes.

    Raises:
        Interrupted: After Ctrl+C, SIGTERM or SIGHUP.
        TrainingError: If a loss is not finite.
        RunFolderError: If `out` cannot be written, holds a single run, lacks the files that
            `resume` needs, or is in use by another process.
        EdgeGossipError: If an algorithm cannot continue, as in `run`.
    """
    out = Path(out)
    if (out / "events.jsonl").exists():
        raise RunFolderError(f"{out} holds a single run; choose another --out for a comparison")
    if resume:
        require_folder(out)
    works: dict[str, Callable[..., Results]] = {
        name: partial(
            run,
            replace(experiment, name=name),
            out=out / name,
            resume=resume and (out / name).is_dir(),
            recipe=recipe,
            command=command,
            trackers=trackers,
        )
        for name, experiment in comparison.experiments.items()
    }
    results: dict[str, Results] = {}
    with locked(out):
        if num_processes > 1 and len(works) > 1:
            done = _at_once(works, out, num_processes, progress or Silent())
        else:
            done = (
                (name, work(num_threads=num_threads, open_pool=open_pool, progress=progress))
                for name, work in works.items()
            )
        for name, found in done:
            results[name] = found
            ordered = {each: results[each] for each in works if each in results}
            write_json(out / "summary.json", summarize(comparison, ordered, recipe))
    return {name: results[name] for name in works}


def _at_once(
    works: Mapping[str, Callable[..., Results]], out: Path, number: int, progress: Progress
) -> Iterator[tuple[str, Results]]:
    jobs = {name: partial(partial, _alone, work) for name, work in works.items()}
    after: dict[str, tuple[str, ...]] = dict.fromkeys(works, ())
    done = do_at_once(jobs, after, num_processes=number, progress=progress)
    try:
        with closing(done):
            for name, future in done:
                yield name, future.result()
    except (Interrupted, KeyboardInterrupt):
        raise interrupted(out) from None


def _alone(work: Callable[..., Results], progress: Progress) -> Results:
    return work(num_threads=0, progress=progress)


def summarize(
    comparison: Comparison, results: dict[str, Results], recipe: str | None
) -> dict[str, Any]:
    """Contents of a comparison's `summary.json`, without unfinished runs.

    The bytes per sample of one dense message are measured in the reference run: its bytes /
    samples / mean out-degree.

    Fields:
        recipe: Name of the recipe; null for a comparison from Python.
        baseline: Name of the reference run.
        target_accuracy: The comparison's own target, or the baseline's best accuracy minus
            `target_gap` (default 0.005). With another metric, the field is named, for example,
            `target_mae`, and unless the metric is in percent, the gap is relative.
        throughput_bound: Bound on the gain from not waiting: the sum of throughputs / (number
            of workers x the smallest one), over workers with data, on idle machines, without
            communication costs.
        bytes_reference: Name of the run that defines the bytes of uncompressed push-sum; null
            if there is none.
        runs: By name, the fields of each run's summary, and the next three fields.
        bytes_per_worker: `bytes_sent` / number of workers.
        bytes_ratio_same_graph: Bytes that dense push-sum with one step per round would send on
            this run's graph for the same number of samples / `bytes_sent`; null without a
            reference.
        bytes_ratio_complete_graph: The same, if dense push-sum sent to all other workers; for
            a run on a directed ring of 8, 7 times the previous ratio.
    """
    baseline = results.get(comparison.baseline)
    metric, target = comparison.metric, comparison.target
    if target is None and baseline is not None:
        target = metric.easier(baseline.best_value, comparison.target_gap)
    reference = comparison.experiments[comparison.baseline]
    platforms = tuple(reference.platforms[rank] for rank in reference.data_ranks)
    return {
        "recipe": recipe,
        "baseline": comparison.baseline,
        f"target_{metric.key}": target,
        "throughput_bound": throughput_bound(platforms),
        "bytes_reference": comparison.bytes_reference,
        "runs": {
            name: result.summary(target, baseline) | _sent(comparison, results, name)
            for name, result in results.items()
        },
    }


def _sent(
    comparison: Comparison, results: dict[str, Results], name: str
) -> dict[str, float | None]:
    found = {each: traffic(comparison.experiments[each], results[each]) for each in results}
    dense = comparison.bytes_reference
    return {
        "bytes_per_worker": found[name].per_worker,
        **found[name].ratios(None if dense is None else found.get(dense)),
    }
