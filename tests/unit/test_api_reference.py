"""The API reference has every public name, once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import edgegossip as eg

PAGES = Path(__file__).parents[2] / "docs" / "api"
SHOWN = re.compile(r"^\.\. auto(?:class|function|data):: (\w+)$", re.MULTILINE)


def names_of(module: str) -> list[str]:
    pages = [page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.rst"))]
    here = [page for page in pages if f".. currentmodule:: {module}\n" in page]
    return sorted(name for page in here for name in SHOWN.findall(page))


@pytest.mark.parametrize("module", ["edgegossip", "edgegossip.contract"])
def test_the_api_reference_has_every_public_name_once(module: str) -> None:
    contract = {name for name in dir(eg.contract) if not name.startswith("_")}
    # The names of `edgegossip` that `edgegossip.contract` also has are shown there.
    public = contract if module == "edgegossip.contract" else {*dir(eg)} - contract
    assert names_of(module) == sorted(public - {"contract"})
