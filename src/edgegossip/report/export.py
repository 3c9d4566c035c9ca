"""Export of a run as a folder in the style of Hugging Face: model, config and model card."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from edgegossip.contract.errors import RunFolderError, UsageError, unknown_name
from edgegossip.report.figures import metric_pictures
from edgegossip.report.folder import ReportData, Run, read_folder, run_folders
from edgegossip.report.page import (
    DRAWING_ERRORS,
    FIGURES,
    platform_groups,
    setting_text,
    template,
)
from edgegossip.report.prose import notices, story
from edgegossip.report.style import Picture, run_colors
from edgegossip.report.timeline import timeline_pictures
from edgegossip.runs.files import make_folder, to_json, write_atomically, write_json

EXPORT = "export"
PARAMS = "params.safetensors"
CARD = "README.md"
_MARK = "library_name: edgegossip"


def export(run: Path | str, out: Path | str | None = None, *, only: str | None = None) -> Path:
    """Write a run's `model.safetensors`, `config.json` and model card (`README.md`).

    The card contains the run's figures, and its numbers as text and as metadata that the
    Hugging Face hub reads.

    Args:
        run: Folder of a run, simulated or gathered, or of a comparison.
        out: Folder to write; None for `export` in the run's own folder.
        only: Run to export if `run` is the folder of a comparison.

    Returns:
        The written folder.

    Raises:
        UsageError: If `only` is missing for a comparison, names none of its runs, or is given
            for a single run.
        RunFolderError: If `run` holds no run or no model, a file in it is damaged, `out` has a
            README.md that is not a run's model card, or `out` cannot be written.
    """
    folder = _find(Path(run), only)
    tensors = _read_model(folder / PARAMS)
    out = folder / EXPORT if out is None else Path(out)
    old_card = out / CARD
    if old_card.exists() and _MARK not in old_card.read_text(
        encoding="utf-8", errors="replace"
    ):
        raise RunFolderError(f"{old_card} is not a model card of a run; choose another --out")
    try:
        data = read_folder(folder)
        pictures = _pictures(data)
        card = _card(data, tensors, pictures)
    except DRAWING_ERRORS as error:
        raise RunFolderError(
            f"what {folder} holds cannot be exported ({error!r:.300}); a file in it is damaged "
            "- run the experiment again"
        ) from error
    make_folder(out / FIGURES)
    for picture in pictures:
        write_atomically(out / FIGURES / f"{picture.name}.png", picture.png)
    model = safetensors.torch.save(tensors, metadata={"format": "pt"})
    write_atomically(out / "model.safetensors", model)
    write_json(out / "config.json", _config(data.runs[0], tensors))
    write_atomically(out / CARD, card.encode())
    return out


def _find(run: Path, only: str | None) -> Path:
    """Folder of the single run to export."""
    folders = run_folders(run)
    if folders == [run]:
        if only is not None:
            raise UsageError(f"{run} holds a single run, so leave out --only")
        return run
    names = [folder.name for folder in folders]
    if only is None:
        raise UsageError(
            f"{run} holds several runs; choose one with --only: {', '.join(names)}"
        )
    if only not in names:
        raise UsageError(unknown_name("run", only, names))
    return run / only


def _read_model(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise RunFolderError(
            f"{path} is missing: the run has left no model; let it end, or interrupt it with "
            "Ctrl+C"
        ) from None
    except (OSError, safetensors.SafetensorError) as error:
        raise RunFolderError(
            f"{path} is damaged ({error}); run the experiment again"
        ) from error


def _pictures(data: ReportData) -> list[Picture]:
    """The curve over time, and the timeline."""
    colors = run_colors([run.name for run in data.runs], data.baseline)
    return [*islice(metric_pictures(data, colors), 1), *timeline_pictures(data, colors)]


def _config(run: Run, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    header = {key: value for key, value in run.log.header.items() if key != "type"}
    return {
        "library_name": "edgegossip",
        "model": _task(run).get("model"),
        "num_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "tensors": {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).partition(".")[2]}
            for name, tensor in tensors.items()
        },
        "experiment": header,
    }


def _task(run: Run) -> Mapping[str, Any]:
    task = run.log.header.get("task")
    return task if isinstance(task, dict) else {}


def _card(data: ReportData, tensors: Mapping[str, Tensor], pictures: list[Picture]) -> str:
    [run] = data.runs
    header, task = run.log.header, _task(run)
    dataset = task.get("dataset")
    last = run.log.evaluations[-1] if run.log.evaluations else None
    values = {spec: last.metrics[spec.name] for spec in run.log.metrics} if last else {}
    recipe = header.get("recipe")
    # Markdown: the filters escape what comes from the run. YAML contains JSON.
    card = template("model_card.md", autoescape=False, yaml=to_json, plain=_plain)
    return card.render(
        title=f"{recipe}: {run.name}" if recipe else run.name,
        run=run,
        story=story(data),
        notices=notices(data),
        values={spec: value for spec, value in values.items() if math.isfinite(value)},
        dataset=dataset.get("name") if isinstance(dataset, dict) else None,
        model=setting_text(task.get("model") or "of the task"),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        algorithm=header["algorithm"],
        platforms=platform_groups(run),
        versions=header.get("versions") or {},
        command=header.get("command"),
        seed=header.get("seed"),
        pictures=pictures,
        figures=FIGURES,
    )


# What makes a link, emphasis, heading, list, formula or mention. Some viewers make links of
# addresses alone. Other punctuation, such as a parenthesis, means nothing by itself.
_MARKUP = re.compile(r"[\\*_\[\]#!~$@]|:(?=//)|(?<=www)\.|^[-+]", re.IGNORECASE)
_NUMBER_OF_ITEM = re.compile(r"^(\d+)([.)])(?=\s|$)")


def _plain(text: object) -> str:
    r"""Text that Markdown shows literally, on one line.

    >>> _plain("a|b <i>")
    'a&#124;b &#60;i&#62;'
    >>> print(_plain("[x](javascript:y) **2. https://z"))
    \[x\](javascript:y) \*\*2. https\://z
    """
    shown = _MARKUP.sub(r"\\\g<0>", " ".join(str(text).split()))
    shown = _NUMBER_OF_ITEM.sub(r"\1\\\2", shown)
    for character in "&<>|`":
        shown = shown.replace(character, f"&#{ord(character)};")
    return shown
