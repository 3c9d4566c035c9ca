"""Cells of the queue: experiments and timings, with all settings that results depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from edgegossip.runs.experiment import Experiment

Row: TypeAlias = Mapping[str, Any]
"""Findings of a cell, as JSON values."""
Rows: TypeAlias = Mapping[str, Row]
"""Findings by name of the cell."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine on which a cell runs.

    Args:
        data_dir: Folder of the data sets.
        torch_device: Device of the models.
    """

    data_dir: Path
    torch_device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A piece of the queue's work, with a stored result.

    Exactly one of `experiment` and `measure` is given.

    Args:
        name: Name of its files, which begins with its letter: "b-vgg11-even-diloco-seed0".
        settings: Settings that its result depends on, as JSON values. A cell whose settings
            have changed runs again.
        experiment: Makes the experiment, from the rows of `after`.
        num_epochs: Passes of all workers together over the training data, for the forecast.
        measure: Measures the machine.
        measuring_seconds: Forecasts the wall seconds of `measure`.
        after: Names of the cells whose rows `experiment` reads.
    """

    name: str
    settings: Mapping[str, Any]
    experiment: Callable[[Machine, Rows], Experiment] | None = None
    num_epochs: float = 0.0
    measure: Callable[[Machine], Row] | None = None
    measuring_seconds: Callable[[Machine], float] | None = None
    after: tuple[str, ...] = ()

    @property
    def letter(self) -> str:
        return self.name.partition("-")[0]

    @property
    def identity(self) -> str:
        """Twelve digits that change whenever a setting does."""
        return digits(self.settings)

    @property
    def kind(self) -> str:
        """Twelve digits that cells share if they differ in the seed alone."""
        return digits({key: value for key, value in self.settings.items() if key != "seed"})


def digits(plain: object) -> str:
    """Twelve hexadecimal digits of JSON values.

    >>> digits({"lr": 0.1, "seed": 0}) == digits({"seed": 0, "lr": 0.1})
    True
    """
    text = json.dumps(plain, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
