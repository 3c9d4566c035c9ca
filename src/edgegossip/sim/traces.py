"""Measurements of real phones, GPUs and spot machines, from files, and traces of jobs."""

from __future__ import annotations

import ast
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from edgegossip.contract.errors import DataError, unknown_name
from edgegossip.contract.protocol import Seconds
from edgegossip.contract.randomness import generator, uniform
from edgegossip.contract.ranges import check_range
from edgegossip.machine.contention import Contention
from edgegossip.sim.platform import ContentionTrace, Platform, ThrottlingTrace

BatchJob: TypeAlias = Literal["word-count", "sort"]

_MAX_BYTES = 2**26
_WORD_COUNT = (
    Contention(cores=0.45, network=1e6, disk=40e6),  # map
    Contention(cores=0.15, network=30e6, disk=5e6),  # shuffle
    Contention(cores=0.30, network=5e6, disk=15e6),  # reduce
)
_SORT = (
    Contention(cores=0.15, disk=120e6),  # read
    Contention(cores=0.15, network=60e6, disk=20e6),  # shuffle
    Contention(cores=0.30, disk=60e6),  # merge
    Contention(cores=0.10, disk=150e6),  # write
)
_JOBS: dict[BatchJob, tuple[Contention, ...]] = {"word-count": _WORD_COUNT, "sort": _SORT}


def phones(
    path: Path | str, num_workers: int, throughput: float, seed: int = 0
) -> tuple[Platform, ...]:
    """Draw phones with replacement; their speeds are from the AI-Benchmark list.

    Args:
        path: JSON, plain or gzipped: a list of objects with "Model" and "CPU_F_AI_Score", the
            benchmark's score for floating-point work on the processor. The FLASH study has
            published such a list (github.com/PKU-Chengxu/FLASH, raw_ai_benchmark_list.json).
        num_workers: Number of phones to draw.
        throughput: Samples per second of the fastest phone in the list.
        seed: Seed for the draw.

    Raises:
        DataError: If the file is missing or has another format.
    """
    hint = 'a list of {"Model": ..., "CPU_F_AI_Score": ...}, as in github.com/PKU-Chengxu/FLASH'
    entries = _read(path, hint)
    try:
        scores = [(str(e["Model"]), _positive(e["CPU_F_AI_Score"])) for e in entries]
        fastest = max(score for _, score in scores)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: {error!r}; expected {hint}") from None
    chosen = [
        scores[int(uniform(seed, rank, "phone") * len(scores))] for rank in range(num_workers)
    ]
    return tuple(
        Platform(name=model, throughput=throughput * score / fastest) for model, score in chosen
    )


def gpus(
    path: Path | str, num_workers: int, job: str = "ResNet-18 (batch size 64)", seed: int = 0
) -> tuple[Platform, ...]:
    """Draw GPUs with replacement; their speeds are those measured on a single job.

    Args:
        path: JSON, plain or gzipped, of the Gavel study (github.com/stanford-futuredata/gavel,
            physical_cluster_throughputs.json): {GPU: {"('JOB', GPUs)": {"null": steps/s}}}.
        num_workers: Number of GPUs to draw.
        job: One of the file's jobs; the name must end with the batch size.
        seed: Seed for the draw.

    Raises:
        DataError: If the file is missing, has another format, or lacks the job.
    """
    hint = """{GPU: {"('JOB', 1)": {"null": steps/s}}}, as in Gavel (see sim.traces.gpus)"""
    measured = _read(path, hint)
    try:
        by_gpu = {
            gpu: {
                job: speeds["null"]
                for name, speeds in jobs.items()
                for job, num_gpus in [ast.literal_eval(name)]
                if num_gpus == 1
            }
            for gpu, jobs in sorted(measured.items())
            if "unconsolidated" not in gpu  # several GPUs on different machines
        }
        known = set.intersection(*map(set, by_gpu.values()))
        if job not in known:
            raise DataError(f"{path}: {unknown_name('job', job, known)}")
        batch_size = int(job.rstrip(")").rsplit(" ", 1)[-1])
        speeds = [(gpu, batch_size * _positive(jobs[job])) for gpu, jobs in by_gpu.items()]
    except (AttributeError, KeyError, TypeError, ValueError, SyntaxError) as error:
        raise DataError(f"{path}, job {job!r}: {error!r}; expected {hint}") from None
    chosen = [
        speeds[int(uniform(seed, rank, "gpu") * len(speeds))] for rank in range(num_workers)
    ]
    return tuple(Platform(name=gpu, throughput=throughput) for gpu, throughput in chosen)


def availability(
    path: Path | str,
    num_workers: int,
    seconds: Seconds,
    *,
    series: str = "",
    hours: float = 24.0,
    seed: int = 0,
) -> tuple[tuple[tuple[Seconds, Seconds], ...], ...]:
    """Times for which spot machines were there, for `Faults.available`.

    A series of up to :math:`n` machines gives the times of :math:`n` workers: machine
    :math:`m` is there while more than :math:`m` are. Workers take the machines of all series in
    turn, and those of one series see the same part of it.

    Args:
        path: JSON, plain or gzipped: {NAME: {"metadata": {"gap_seconds": ...}, "data": [number
            of machines that were there, by tick]}}: all files of
            github.com/skypilot-org/spot-traces in one object, by name.
        num_workers: Number of workers.
        seconds: Duration of the run.
        series: Beginning of the names of the series to use, such as "availability/16-node"; all
            by default.
        hours: Hours of the traces for which the run stands.
        seed: Seed for the part of the traces.

    Returns:
        For each worker, beginning and end of each time for which it is there, in seconds of the
        run; a time that lasts beyond the run ends at infinity.

    Raises:
        DataError: If the file is missing, has another format, or has no such series of so many
            hours.
        ValueError: If a number is out of range.
    """
    check_range("num_workers", num_workers, "at least 1")
    check_range("seconds", seconds, "above 0 and finite")
    check_range("hours", hours, "above 0 and finite")
    hint = (
        '{NAME: {"metadata": {"gap_seconds": ...}, "data": [...]}}, see sim.traces.availability'
    )
    machines: list[tuple[list[bool], Seconds]] = []
    place = uniform(seed, "availability")
    try:
        for name, each in sorted(_read(path, hint).items()):
            gap = _positive(each["metadata"]["gap_seconds"])
            counts = [int(count) for count in each["data"]]
            num_ticks = math.ceil(hours * 3600 / gap)
            if not name.startswith(series) or num_ticks > len(counts):
                continue
            first = int(place * (len(counts) - num_ticks + 1))
            part = counts[first : first + num_ticks]
            machines += [([n > m for n in part], gap) for m in range(max(counts))]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: {error!r}; expected {hint}") from None
    if not machines:
        raise DataError(
            f"{path} has no series of {hours:g} hours whose name begins with {series!r}; "
            "choose fewer hours or another series"
        )
    scale = seconds / (hours * 3600)
    chosen = [machines[rank % len(machines)] for rank in range(num_workers)]
    return tuple(_spans(is_there, scale * gap, seconds) for is_there, gap in chosen)


def _spans(
    is_there: Sequence[bool], gap: Seconds, seconds: Seconds
) -> tuple[tuple[Seconds, Seconds], ...]:
    spans = []
    for value, ticks in itertools.groupby(range(len(is_there)), key=is_there.__getitem__):
        each = [*ticks]
        end = (each[-1] + 1) * gap
        if value and each[0] * gap < seconds:
            spans.append((each[0] * gap, end if end < seconds else math.inf))
    return tuple(spans)


def batch_jobs(
    seed: int = 0,
    *,
    phase: Seconds = 8.0,
    intensity: float = 1.0,
    period: Seconds = 3600.0,
    job: BatchJob | None = None,
) -> ContentionTrace:
    """The load of jobs like WordCount and Sort, which run in sequence with pauses.

    A job goes through its phases (map, shuffle, reduce; read, shuffle, merge, write). Each
    phase uses cores, network and disk differently, and phases vary in intensity. The duration
    of a phase or a pause has an exponential distribution and is unpredictable. The loads are
    not measured, but modeled on such jobs on a machine with eight cores and one disk.

    Args:
        seed: Seed of the draws; use a different one for each platform.
        phase: Mean seconds of a phase or pause, that is, between two changes of the load.
        intensity: Load relative to the usual one, in (0, 2]; phases vary by up to a third.
        period: Seconds after which the trace repeats.
        job: "word-count" or "sort" for only that kind of job; None for both kinds at random.

    Raises:
        ValueError: If a number is out of range, or the kind of job is unknown.

    >>> len(batch_jobs(seed=1, phase=4.0, period=400.0).times) > 50
    True
    """
    if not 0 < phase < period < math.inf or not 0 < intensity <= 2:
        raise ValueError(
            "phase and period must be above 0, phase the smaller, and intensity in (0, 2], got "
            f"{phase}, {period} and {intensity}"
        )
    if job is not None and job not in _JOBS:
        raise ValueError(unknown_name("job", job, _JOBS))
    random = generator(seed, "batch jobs")
    times, contentions, now = [], [], 0.0
    while now < period:
        drawn: BatchJob = "word-count" if torch.rand(1, generator=random) < 0.5 else "sort"
        for load in (Contention(), *_JOBS[job or drawn]):
            factor = intensity * float(torch.empty(1).uniform_(2 / 3, 4 / 3, generator=random))
            cores = min(1.0, factor * load.cores)
            if now < period:
                times.append(now)
                contentions.append(Contention(cores, factor * load.network, factor * load.disk))
            now += phase * float(torch.empty(1).exponential_(generator=random))
    return ContentionTrace(tuple(times), tuple(contentions), period)


def drift(
    seed: int = 0, *, most: float = 2.0, step: Seconds = 60.0, period: Seconds = 3600.0
) -> ThrottlingTrace:
    """A speed that drifts: a slowdown that walks at random between 1 and `most`.

    The logarithm of the slowdown starts anywhere in its range, moves by up to a quarter of the
    range in each step, and is reflected at the ends.

    Args:
        seed: Seed of the draws; use a different one for each platform.
        most: Largest slowdown, at least 1.
        step: Seconds between two changes.
        period: Seconds after which the trace repeats, above `step`.

    Raises:
        ValueError: If a number is out of range.

    >>> trace = drift(seed=1, most=4.0, step=1.0, period=100.0)
    >>> len(trace.times), 1 <= min(trace.slow_downs) <= max(trace.slow_downs) <= 4
    (100, True)
    """
    if not 1 <= most < math.inf or not 0 < step < period < math.inf:
        raise ValueError(
            "most must be at least 1, and step and period above 0, step the smaller, got "
            f"{most}, {step} and {period}"
        )
    times = [k * step for k in range(math.ceil(period / step))]
    place, slow_downs = uniform(seed, "drift"), []
    for k in range(len(times)):
        slow_downs.append(most**place)
        moved = abs(place + (uniform(seed, "drift", k) - 0.5) / 2)
        place = min(moved, 2 - moved)
    return ThrottlingTrace(tuple(times), tuple(slow_downs), period)


def _positive(value: Any) -> float:  # noqa: ANN401
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{number} is not a speed")
    return number


def _read(path: Path | str, hint: str) -> Any:  # noqa: ANN401
    path = Path(path)
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as file:
            # A compressed file may be far larger than it looks.
            text: bytes = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it holds more than {_MAX_BYTES:,} bytes")
        return json.loads(text.decode())
    except FileNotFoundError:
        raise DataError(f"there is no trace {path}; expected {hint}") from None
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise DataError(f"cannot read the trace {path} ({error}); expected {hint}") from None
