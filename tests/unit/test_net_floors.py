"""The four floors of `net`: no floor imports one above it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.test_architecture import SOURCES, imports

ALLOWED = {
    "identity": {"identity"},
    "zenoh": {"identity", "zenoh"},
    "guard": {"guard", "identity"},
    "host": {"guard", "host"},
}
"""Floors that each floor may import, besides the modules of `net` itself, which all share."""


def floor_of(name: str) -> str | None:
    top, *rest = name.removeprefix("edgegossip.net.").split(".")
    return top if name.startswith("edgegossip.net.") and rest and top in ALLOWED else None


@pytest.mark.parametrize("floor", ALLOWED)
def test_a_floor_imports_none_above_it(floor: str) -> None:
    for file in (SOURCES / "net" / floor).glob("*.py"):
        floors = {floor_of(name) for name in imports(file)} - {None}
        assert floors <= ALLOWED[floor], f"{file} imports {floors - ALLOWED[floor]}"


def test_what_all_floors_share_needs_only_certificates() -> None:
    files: list[Path] = [*(SOURCES / "net").glob("*.py")]
    assert {floor_of(name) for file in files for name in imports(file)} <= {None, "identity"}


def test_a_host_runs_without_zenoh() -> None:
    for floor in ("guard", "host"):
        for file in (SOURCES / "net" / floor).glob("*.py"):
            assert "zenoh" not in {name.split(".")[0] for name in imports(file)}
