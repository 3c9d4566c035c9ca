"""The page of a study: its figures and tables, and the paper's figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import RunFolderError
from edgegossip.report.charts import study_picture
from edgegossip.report.page import DRAWING_ERRORS, template, write_page

STUDY = "study.json"
_MAX_PANELS = 24
_MAX_VALUES = 10**5
_FIELDS = {
    "study": str,
    "title": str,
    "printed": list,
    "scaled_down": list,
    "cells": dict,
    "num_cells": int,
    "errors": dict,
    "figures": list,
    "tables": list,
    "versions": dict,
    "machine": dict,
}


def write_study_report(folder: Path) -> Path:
    """Write `figures/*.png`, `figures/*.svg` and `report.html` from `study.json` alone.

    Args:
        folder: Folder of a study, which may have been interrupted.

    Returns:
        Path of the page, which is self-contained and makes no requests.

    Raises:
        RunFolderError: If `study.json` is missing or damaged, or `folder` cannot be written.
    """
    study = _read(folder / STUDY)
    try:
        _require_drawable(study["figures"])
        pictures = [study_picture(figure) for figure in study["figures"]]
        page = template("study.html").render(study=study, pictures=pictures)
    except DRAWING_ERRORS as error:
        raise RunFolderError(
            f"{folder / STUDY} is damaged ({error!r:.300}); continue the "
            "study, which writes it again"
        ) from error
    return write_page(folder, page, pictures)


def _require_drawable(figures: Sequence[Mapping[str, Any]]) -> None:
    """Validate the names and the size of figures.

    Raises:
        ValueError: If a figure is invalid. Values that are not figures at all raise other
            errors.
    """
    for figure in figures:
        if not re.fullmatch(r"\w[\w.-]{,99}", figure["name"], re.ASCII):
            raise ValueError(f"figure {figure['name']!r:.60} has no name for a file")
        panels = figure["panels"]
        num_values = sum(len(each["y"]) for panel in panels for each in panel["series"])
        if not 0 < len(panels) <= _MAX_PANELS or num_values > _MAX_VALUES:
            raise ValueError(
                f"figure {figure['name']!r} has {len(panels)} panels and {num_values} values; "
                f"expected 1 .. {_MAX_PANELS} and at most {_MAX_VALUES}"
            )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        study: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(
            f"cannot read {path} ({error}); give the folder that a study wrote"
        ) from error
    for name, kind in _FIELDS.items():
        if not isinstance(study, dict) or not isinstance(study.get(name), kind):
            raise RunFolderError(
                f"{path} has no {kind.__name__} {name!r}; give the folder that a study wrote"
            )
    return study
