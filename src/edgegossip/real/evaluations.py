"""Evaluations of a run on real machines, stored for resuming and for gathering again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import RunFolderError
from edgegossip.contract.metrics import MetricSpec
from edgegossip.contract.protocol import Rank
from edgegossip.runs.files import read_json, write_json
from edgegossip.runs.results import Evaluation

_LOG = logging.getLogger("edgegossip.runs")


class Evaluations:
    """Evaluations by the indices of their snapshots.

    Args:
        path: File of the evaluations; if it exists, it is read.
        metrics: Metrics of the run, the chosen one first.

    Attributes:
        kept: Indices of the snapshots that are no longer needed, because their evaluations are
            stored.
    """

    def __init__(self, path: Path, metrics: Sequence[MetricSpec]) -> None:
        self._path = path
        self._by_index, self._ranks = _read(path, metrics)
        self._has_warned = False
        self.kept = set(self._by_index)

    def covers(self, index: int, ranks: Sequence[Rank]) -> bool:
        """Whether this snapshot was evaluated with exactly these workers in the run folder."""
        return index in self._by_index and self._ranks[index] == ranks

    @property
    def history(self) -> list[Evaluation]:
        """All evaluations, in order of time."""
        return [self._by_index[index] for index in sorted(self._by_index)]

    def add(self, index: int, evaluation: Evaluation, ranks: Sequence[Rank]) -> None:
        """Store the evaluation of a snapshot; a full disk does not end the run."""
        self._by_index[index] = evaluation
        self._ranks[index] = ranks
        self._keep()

    def drop_from(self, index: int) -> None:
        """Forget the evaluations of snapshots from this index on."""
        later = [each for each in self._by_index if each >= index]
        for each in later:
            del self._by_index[each]
        if later:
            self._keep()

    def _keep(self) -> None:
        content = {
            str(index): {**each.line(), "ranks": self._ranks[index]}
            for index, each in self._by_index.items()
        }
        try:
            write_json(self._path, content)
            self.kept = set(self._by_index)
        except RunFolderError as error:
            if not self._has_warned:
                _LOG.warning("%s - until then, snapshots are kept", error)
            self._has_warned = True


def _read(
    path: Path, metrics: Sequence[MetricSpec]
) -> tuple[dict[int, Evaluation], dict[int, Any]]:
    """The evaluations, and the workers in each."""
    if not path.exists():
        return {}, {}
    try:
        found = {int(index): each for index, each in read_json(path).items()}
        read = {index: Evaluation.from_line(each, metrics) for index, each in found.items()}
        return read, {index: each["ranks"] for index, each in found.items()}
    except (RunFolderError, LookupError, TypeError, ValueError) as error:
        _LOG.warning("%s is damaged (%s) - continuing without it", path, error)
        return {}, {}
