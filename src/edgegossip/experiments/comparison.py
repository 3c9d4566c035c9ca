"""Carry out several runs of one task and set them side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgegossip.core.errors import RunFolderError
from edgegossip.experiments.experiment import Comparison, throughput_bound
from edgegossip.experiments.files import write_json
from edgegossip.experiments.folder_lock import locked
from edgegossip.experiments.progress import Progress
from edgegossip.experiments.results import Results
from edgegossip.experiments.run_folder import require_folder
from edgegossip.experiments.runner import run
from edgegossip.experiments.traffic import traffic


def compare(
    comparison: Comparison,
    *,
    out: Path | str,
    resume: bool = False,
    recipe: str | None = None,
    command: str | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Results]:
    """Run every experiment of `comparison`, each in a folder of its own within `out`.

    ``out/summary.json`` is written after each run, with what there is by then.

    Args:
        comparison: What to run, one after the other.
        out: Made if need be.
        resume: Read the runs in `out` that are over, go on with the one that is not.
        recipe: Name of the recipe, for the record.
        command: That would run it again, for the record.
        num_threads: Of the compute pool; None for one a core.
        progress: A live view.

    Raises:
        Interrupted: After Ctrl+C, SIGTERM or SIGHUP.
        TrainingError: If a loss is not finite.
        RunFolderError: If `out` cannot be written, does not hold what `resume` needs, or is in
            use by another process.
    """
    out = Path(out)
    if (out / "events.jsonl").exists():
        raise RunFolderError(f"{out} holds a single run; choose another --out for a comparison")
    if resume:
        require_folder(out)
    results: dict[str, Results] = {}
    with locked(out):
        for name, experiment in comparison.experiments.items():
            results[name] = run(
                replace(experiment, name=name),
                out=out / name,
                resume=resume and (out / name).is_dir(),
                recipe=recipe,
                command=command,
                num_threads=num_threads,
                progress=progress,
            )
            write_json(out / "summary.json", summarize(comparison, results, recipe))
    return results


def summarize(
    comparison: Comparison, results: dict[str, Results], recipe: str | None
) -> dict[str, Any]:
    """What `summary.json` of a comparison holds; runs that are not there yet are left out."""
    baseline = results.get(comparison.baseline)
    target = comparison.target_accuracy
    if target is None and baseline is not None:
        target = baseline.best_accuracy - comparison.target_gap
    reference = comparison.experiments[comparison.baseline]
    platforms = tuple(reference.platforms[rank] for rank in reference.data_ranks)
    return {
        "recipe": recipe,
        "baseline": comparison.baseline,
        "target_accuracy": target,
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
