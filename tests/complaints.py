"""What a command complains about."""

from __future__ import annotations

import pytest


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """What was complained about, in one line or two."""
    said = capsys.readouterr().err.strip()
    [line] = [line for line in said.splitlines() if line.startswith("edgegossip: ")]
    assert said.endswith(line)
    assert "Traceback" not in said
    return line
