"""Error messages of commands."""

from __future__ import annotations

import pytest


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error message, of one line or two."""
    said = capsys.readouterr().err.strip()
    [line] = [line for line in said.splitlines() if line.startswith("edgegossip: ")]
    assert said.endswith(line)
    assert "Traceback" not in said
    return line
