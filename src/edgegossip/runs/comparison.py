"""Comparisons: several runs of one task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import Interrupted, RunFolderError
from edgegossip.contract.topology import CompleteTopology, Topology
from edgegossip.runs.describe import header
from edgegossip.runs.experiment import Comparison, Experiment, throughput_bound
from edgegossip.runs.files import locked, write_json
from edgegossip.runs.folder import RunFolder, require_folder
from edgegossip.runs.parallel import AtOnce, do_at_once
from edgegossip.runs.process import interrupted
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.runs.tracking import Progress, Silent, Tracker


def compare(
    comparison: Comparison,
    *,
    out: Path | str,
    resume: bool = False,
    recipe: str | None = None,
    command: str | None = None,
    num_threads: int | None = None,
    num_processes: int = 1,
    at_once: AtOnce | None = None,
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
        at_once: Carries out runs in parallel instead of processes here, e.g. a `RayRuns`; an
            interrupted run begins again.
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
    settings = {"recipe": recipe, "command": command, "trackers": trackers}
    works = {
        name: _OneRun(
            replace(experiment, name=name),
            out / name,
            resume=resume and (out / name).is_dir(),
            settings=settings,
        )
        for name, experiment in comparison.experiments.items()
    }
    results: dict[str, Results] = {}
    done: Iterator[tuple[str, Results]]
    with locked(out):
        if at_once is not None:
            # Other machines do not see the folders here, so these are checked and read first.
            read = {name: _finished(work, recipe) for name, work in works.items()}
            rest = {name: work for name, work in works.items() if read[name] is None}
            finished = ((name, each) for name, each in read.items() if each is not None)
            done = chain(finished, _at_once(rest, out, at_once, progress or Silent()))
        elif num_processes > 1 and len(works) > 1:
            here = partial(do_at_once, num_processes=num_processes)
            done = _at_once(works, out, here, progress or Silent())
        else:
            done = ((name, work(progress, num_threads)) for name, work in works.items())
        for name, result in done:
            results[name] = replace(result, folder=out / name)
            ordered = {each: results[each] for each in works if each in results}
            write_json(out / "summary.json", summarize(comparison, ordered, recipe))
    return {name: results[name] for name in works}


@dataclass(frozen=True, slots=True)
class _OneRun:
    """One run of a comparison, here, in another process, or on another machine."""

    experiment: Experiment
    folder: Path
    resume: bool
    settings: Mapping[str, Any]

    def moved(self, folder: Path) -> _OneRun:
        return replace(self, folder=folder, resume=False)

    def __call__(
        self, progress: Progress | None = None, num_threads: int | None = 0
    ) -> Results:
        return run(
            self.experiment,
            out=self.folder,
            resume=self.resume,
            num_threads=num_threads,
            progress=progress,
            **self.settings,
        )


def _finished(work: _OneRun, recipe: str | None) -> Results | None:
    """Check the folder of a run as `run` does; return the results of a finished run."""
    if not work.folder.is_dir():
        return None
    described = header(work.experiment, recipe)
    return RunFolder(work.folder, described, resume=work.resume).finished_results()


def _at_once(
    works: Mapping[str, _OneRun], out: Path, at_once: AtOnce, progress: Progress
) -> Iterator[tuple[str, Results]]:
    if not works:
        return
    jobs = {name: partial(replace, work) for name, work in works.items()}
    done = at_once(jobs, dict.fromkeys(works, ()), progress=progress)
    try:
        with closing(done):
            for name, future in done:
                yield name, future.result()
    except (Interrupted, KeyboardInterrupt):
        raise interrupted(out) from None


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
    sent = {name: traffic(comparison.experiments[name], each) for name, each in results.items()}
    dense = sent.get(comparison.bytes_reference or "")
    return {
        "recipe": recipe,
        "baseline": comparison.baseline,
        f"target_{metric.key}": target,
        "throughput_bound": throughput_bound(platforms),
        "bytes_reference": comparison.bytes_reference,
        "runs": {
            name: {
                **result.summary(target, baseline),
                "bytes_per_worker": sent[name].per_worker,
                **sent[name].ratios(dense),
            }
            for name, result in results.items()
        },
    }


# Traffic.


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

    >>> from edgegossip.contract.topology import ring, star
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
