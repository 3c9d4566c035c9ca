"""Platforms drawn from measurements of real phones and GPUs; the files are the user's own."""

from __future__ import annotations

import ast
import gzip
import json
import math
from pathlib import Path
from typing import Any

from edgegossip.core.errors import DataError, unknown_name
from edgegossip.core.randomness import uniform
from edgegossip.sim.platform import Platform


def phones(
    path: Path, num_workers: int, throughput: float, seed: int = 0
) -> tuple[Platform, ...]:
    """Draw phones, with replacement, whose speeds are those of the AI-Benchmark list.

    Args:
        path: JSON, plain or gzipped: a list of objects with "Model" and "CPU_F_AI_Score", the
            benchmark's score of floating-point work on the processor. The list that the FLASH
            study published is one (github.com/PKU-Chengxu/FLASH, raw_ai_benchmark_list.json).
        num_workers: Phones to draw.
        throughput: Samples per second of the fastest phone of the list.
        seed: Of the draw.

    Raises:
        DataError: If the file is missing or not of this form.
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
    path: Path, num_workers: int, job: str = "ResNet-18 (batch size 64)", seed: int = 0
) -> tuple[Platform, ...]:
    """Draw GPUs, with replacement, at the speeds at which they were measured on a job alone.

    Args:
        path: JSON, plain or gzipped, of the Gavel study (github.com/stanford-futuredata/gavel,
            physical_cluster_throughputs.json): {GPU: {"('JOB', GPUs)": {"null": steps/s}}}.
        num_workers: GPUs to draw.
        job: One of the file's jobs whose name ends in its batch size.
        seed: Of the draw.

    Raises:
        DataError: If the file is missing or not of this form, or the job is not in it.
    """
    hint = """{GPU: {"('JOB', 1)": {"null": steps/s}}}, as in Gavel (see sim.traces.gpus)"""
    measured = _read(path, hint)
    try:
        by_gpu = {
            gpu: {ast.literal_eval(name)[0]: speeds["null"] for name, speeds in jobs.items()}
            for gpu, jobs in sorted(measured.items())
            if "unconsolidated" not in gpu
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


def _positive(value: Any) -> float:  # noqa: ANN401
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{number} is not a speed")
    return number


def _read(path: Path, hint: str) -> Any:  # noqa: ANN401
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            return json.load(file)
    except FileNotFoundError:
        raise DataError(f"there is no trace {path}; expected {hint}") from None
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"cannot read the trace {path} ({error}); expected {hint}") from None
