"""Settings that all studies share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgegossip.recipes.recipe_settings import default_data_dir


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Settings that all studies share.

    Args:
        short: Seconds instead of an hour: built-in data and a small model. It shows that
            everything works; its numbers mean nothing.
        seeds: Each run is repeated with these, which are different.
        data_dir: Holds the data sets, as docs/recipes.md says; by default $EDGEGOSSIP_DATA.

    Raises:
        ValueError: If there is no seed, or one comes twice.
    """

    short: bool = False
    seeds: tuple[int, ...] = (0,)
    data_dir: Path = default_data_dir()

    def __post_init__(self) -> None:
        check_seeds(self.seeds)

    def plain(self) -> dict[str, object]:
        """In JSON, less what has no effect on results."""
        return {"short": self.short, "seeds": list(self.seeds)}


def check_seeds(seeds: tuple[int, ...]) -> None:
    """Require seeds that repeat a run.

    Raises:
        ValueError: If there is no seed, or one comes twice.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be one or more, all different, got {seeds}")
