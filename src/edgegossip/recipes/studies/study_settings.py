"""Settings common to studies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgegossip.recipes.tasks import default_data_dir


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Settings common to studies.

    Args:
        short: Run for seconds instead of an hour, with built-in data and a small model. This
            shows that everything works, but the numbers mean nothing.
        seeds: Seeds, all different; every run is repeated with each of them.
        data_dir: Folder of the data sets (see docs/recipes.md); by default $EDGEGOSSIP_DATA.

    Raises:
        ValueError: If there is no seed, or a duplicate.
    """

    short: bool = False
    seeds: tuple[int, ...] = (0,)
    data_dir: Path = default_data_dir()

    def __post_init__(self) -> None:
        check_seeds(self.seeds)

    def plain(self) -> dict[str, object]:
        """The settings that affect results, as JSON values."""
        return {"short": self.short, "seeds": list(self.seeds)}


def check_seeds(seeds: tuple[int, ...]) -> None:
    """Validate the seeds of repetitions.

    Raises:
        ValueError: If there is no seed, or a duplicate.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be one or more, all different, got {seeds}")
