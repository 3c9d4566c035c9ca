"""The page of a study: its figures, tables, and what the paper printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgegossip.core.atomic import write_whole
from edgegossip.core.errors import RunFolderError
from edgegossip.report.charts import study_picture
from edgegossip.report.page import FIGURES, REPORT, template
from edgegossip.report.style import Picture

STUDY = "study.json"
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
        folder: Of a study; it may have been interrupted.

    Returns:
        Where the page is. It makes no request to anywhere: all it shows is inside.

    Raises:
        RunFolderError: If `study.json` is missing or damaged, or `folder` cannot be written.
    """
    study = _read(folder / STUDY)
    try:
        pictures = [study_picture(figure) for figure in study["figures"]]
        page = template("study.html").render(study=study, pictures=pictures)
    except (LookupError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{folder / STUDY} is damaged ({type(error).__name__}: {error}); go on with the "
            "study, and it is written anew"
        ) from error
    try:
        _write(folder, page, pictures)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {error.filename or folder} ({error.strerror}); the study itself is "
            "there: make room, or copy its folder elsewhere, and report it again"
        ) from error
    return folder / REPORT


def _write(folder: Path, page: str, pictures: list[Picture]) -> None:
    (folder / FIGURES).mkdir(exist_ok=True)
    for picture in pictures:
        write_whole(folder / FIGURES / f"{picture.name}.png", picture.png)
        write_whole(folder / FIGURES / f"{picture.name}.svg", picture.svg)
    write_whole(folder / REPORT, page.encode())


def _read(path: Path) -> Mapping[str, Any]:
    try:
        study = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"cannot read {path} ({error}); give the folder that a study wrote"
        ) from error
    for name, kind in _FIELDS.items():
        if not isinstance(study, dict) or not isinstance(study.get(name), kind):
            raise RunFolderError(
                f"{path} has no {kind.__name__} {name!r}; give the folder that a study wrote"
            )
    found: Mapping[str, Any] = study
    return found
