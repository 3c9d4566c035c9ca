"""A report that a notebook shows."""

from __future__ import annotations

from pathlib import Path

from edgegossip.core.errors import UsageError
from edgegossip.experiments.inline import framed
from edgegossip.experiments.results import Results
from edgegossip.report.page import write_report


class Report:
    """Draws the report of a run or a comparison; a notebook shows it as the output of a cell.

    Args:
        run: Results of a run, or the folder of a run or a comparison.
        height: Height in a notebook, in pixels.

    Attributes:
        page: Path of the page.

    Raises:
        UsageError: If the results have no folder.
        RunFolderError: See `write_report`.
    """

    def __init__(self, run: Results | Path | str, *, height: int = 640) -> None:
        folder = run.folder if isinstance(run, Results) else Path(run)
        if folder is None:
            raise UsageError("these results have no folder, so there is no report of them")
        self.page = write_report(folder)
        self._height = height

    def __repr__(self) -> str:
        return f"Report({str(self.page.parent)!r})"

    def _repr_html_(self) -> str | None:
        return framed(self.page, self._height)
