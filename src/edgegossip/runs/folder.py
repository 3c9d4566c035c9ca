"""The folder of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.runs.best import BestModel
from edgegossip.runs.events import EventReader
from edgegossip.runs.files import (
    load_checkpoint,
    read_json,
    save_checkpoint,
    write_atomically,
    write_json,
)
from edgegossip.runs.results import ENDS, Results

BEST = "best.safetensors"
"""The best averaged model by validation."""
_ABSENT = object()


class RunFolder:
    """Paths and files of one run; `docs/run-folder.md` describes each.

    Args:
        path: Existing folder, already `locked`.
        header: The resolved experiment, from `describe.header`.
        resume: Continue the run in the folder, if any, which must be of the same experiment.
        replace: Replace the results in the folder; without `resume` and `replace`, the folder
            must hold no run.

    Raises:
        RunFolderError: If the folder cannot be written, or has unexpected contents.
    """

    def __init__(
        self, path: Path, header: dict[str, Any], *, resume: bool, replace: bool = False
    ) -> None:
        self.path = path
        self.header = header
        self.events = path / "events.jsonl"
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self._experiment = path / "experiment.json"
        self._checkpoint = path / "checkpoint.safetensors"
        self._summary = path / "summary.json"
        # A run killed before it kept anything is resumed from the start.
        self._resume = resume and self._experiment.exists()
        if self._resume:
            self._require_same_experiment()
            return
        if replace:
            # The old results do not summarize what will be in the log.
            self._summary.unlink(missing_ok=True)
        elif holds_run(path):
            raise RunFolderError(
                f"{path} already holds a run; choose another --out, or --resume it (in Python: "
                "another out, or resume=True)"
            )
        self.drop_checkpoint()  # of a run that stopped before anything was measured
        write_json(self._experiment, header)

    def _require_same_experiment(self) -> None:
        now = json.loads(json.dumps(self.header))
        # A run may be resumed after an edit of unrelated code.
        kept, now = ({**each, "commit": None} for each in (read_json(self._experiment), now))
        if changed := difference(kept, now):
            raise RunFolderError(
                f"{self.path} holds another experiment: {changed}; resume with the same "
                "settings, or choose another --out"
            )

    def write_results(self, results: Results, error: str | None = None) -> None:
        """Write the averaged models, and then `summary.json`."""
        _write_model(self.path / "params.safetensors", results.params)
        if results.best is None:
            (self.path / BEST).unlink(missing_ok=True)  # of an earlier gathering
        else:
            _write_model(self.path / BEST, results.best.params)
        # Last: a folder with a summary is complete.
        write_json(
            self._summary,
            {
                "name": results.name,
                "reason": results.reason,
                "error": error,
                **results.summary(),
                worker_values(results.metric): results.worker_values,
                **({"disagreements": found} if (found := results.disagreements) else {}),
            },
        )

    def save_checkpoint(self, tree: object) -> None:
        save_checkpoint(self._checkpoint, tree)

    def drop_checkpoint(self) -> None:
        """Delete the checkpoint of a completed run."""
        self._checkpoint.unlink(missing_ok=True)

    def checkpoint(self) -> dict[str, Any] | None:
        """Return the checkpoint to resume from, if any, and delete the old summary."""
        if not self._resume:
            return None
        checkpoint: dict[str, Any] | None = None
        if self._checkpoint.exists():
            checkpoint = load_checkpoint(self._checkpoint)
            size = checkpoint.get("log_size") if isinstance(checkpoint, dict) else None
            if not isinstance(size, int) or size < 0:
                raise RunFolderError(
                    f"{self._checkpoint} is not the checkpoint of a run; delete it, and "
                    "--resume begins from the start"
                )
        # The old results do not summarize what will be in the log.
        self._summary.unlink(missing_ok=True)
        return checkpoint

    def finished_results(self) -> Results | None:
        """The results, if this folder is resumed and its run has ended by itself."""
        return finished_results(self.path) if self._resume else None


def _write_model(path: Path, params: Mapping[str, Tensor]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in params.items()}
    write_atomically(path, safetensors.torch.save(tensors))


def holds_run(path: Path) -> bool:
    """Whether a folder has results, or a log of more than the experiment."""
    if (path / "summary.json").exists():
        return True
    log = path / "events.jsonl"
    if not log.exists():
        return False
    with log.open("rb") as file:
        file.readline()  # the only line if the first evaluation raised an error
        return bool(file.readline())


def finished_results(path: Path) -> Results | None:
    """The results in a folder, if its run has ended by itself.

    Raises:
        RunFolderError: If a file is missing or damaged.
    """
    if not (path / "summary.json").exists():
        return None
    results = load_results(path)
    return results if results.reason in ENDS else None


def require_folder(path: Path) -> None:
    """Raise RunFolderError unless there is a folder to resume."""
    if not path.is_dir():
        raise RunFolderError(
            f"there is no folder {path} to resume; give the --out of an interrupted run, or "
            "leave out --resume"
        )


def load_results(path: Path) -> Results:
    """Read the results of a run from its folder.

    Raises:
        RunFolderError: If a file is missing or damaged.
    """
    try:
        summary = read_json(path / "summary.json")
        log = EventReader(path / "events.jsonl")
        if not (history := log.evaluations()):
            raise LookupError("no evaluation is left")
        values = summary[worker_values(log.metrics[0])]
        best = None
        if "kept_by" in summary:
            kept = safetensors.torch.load_file(path / BEST)
            best = BestModel.from_summary(summary, kept, log.metrics)
        return Results(
            name=summary["name"],
            reason=summary["reason"],
            history=history,
            metric=log.metrics[0],
            worker_values=[math.nan if value is None else value for value in values],
            params=safetensors.torch.load_file(path / "params.safetensors"),
            virtual_seconds=summary["virtual_seconds"],
            wall_seconds=summary["wall_seconds"],
            mean_staleness=summary["mean_staleness"],
            folder=path,
            disagreements=tuple(map(str, summary.get("disagreements", ()))),
            best=best,
        )
    except (OSError, LookupError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise RunFolderError(
            f"the results in {path} are damaged ({error}); run it again elsewhere"
        ) from error


def load(folder: Path | str) -> Results | dict[str, Results]:
    """Read the results of a folder that any command or function has written.

    ::

        results = eg.load("runs/quickstart/2026-11-28-101500")
        frames = {name: each.frame() for name, each in results.items()}

    Args:
        folder: Folder of a run, or one with several: a comparison, a study, a sweep or a plan.

    Returns:
        The results of a run; of several, by path within the folder, in order of the path. Runs
        that have not ended are left out.

    Raises:
        RunFolderError: If no run in the folder has ended, or a file is damaged.
    """
    folder = Path(folder)
    if (folder / "summary.json").exists() and (folder / "events.jsonl").exists():
        return load_results(folder)
    found = {
        log.parent.relative_to(folder).as_posix(): load_results(log.parent)
        for log in sorted(folder.rglob("events.jsonl"))
        # The folders of real workers belong to the run above them.
        if log.parent.parent.name != "workers" and log.with_name("summary.json").exists()
    }
    if not found:
        raise RunFolderError(
            f"no run has ended in {folder}; give a folder that edgegossip or eg.run has written"
        )
    return found


def worker_values(metric: MetricSpec) -> str:
    """The field of `summary.json` with the values of the workers' own models."""
    return "worker_accuracies" if metric.name == ACCURACY.name else "worker_values"


def difference(kept: object, now: object) -> str | None:
    """Describe the first field in which two resolved experiments differ; None if none does.

    >>> difference({"task": {"lr": 0.1}}, {"task": {"lr": 0.2}})
    'its task.lr is 0.1, now 0.2'
    >>> difference({}, {"target": None})
    'its target is absent, now null'
    """
    if (found := _first_difference(kept, now)) is None:
        return None
    name, before, after = found
    return f"its {name} is {_shorten(before)}, now {_shorten(after)}"


def _first_difference(
    kept: object, now: object, name: str = ""
) -> tuple[str, object, object] | None:
    if isinstance(kept, dict) and isinstance(now, dict):
        for key in {**now, **kept}:
            path = f"{name}.{key}" if name else key
            before, after = (each.get(key, _ABSENT) for each in (kept, now))
            if found := _first_difference(before, after, path):
                return found
        return None
    return None if kept == now else (name, kept, now)


def _shorten(value: object) -> str:
    """Write a value as JSON of at most 60 characters."""
    text = "absent" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
