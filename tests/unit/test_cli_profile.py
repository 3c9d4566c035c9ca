"""The command `edgegossip profile`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from edgegossip.cli import profile_command as profile
from edgegossip.cli.profile_command import profile_command
from edgegossip.contract.errors import UsageError
from edgegossip.machine.profile import Profile
from edgegossip.machine.profiling import choose_loads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "profile needs a recipe: quickstart, another of"),
        (["--minutes", "3"], "profile needs a recipe"),
        (["quickstrat"], "did you mean 'quickstart'"),
        (
            ["quickstart", "--minutes", "0.1"],
            "minutes must be at least 0.5 and finite, got 0.1",
        ),
        (["quickstart", "--threads", "0"], "threads must be at least 1, got 0"),
        (["quickstart", "--out", "no/such/profile.csv"], "there is no folder no/such"),
        (["quickstart", "--only", "gosdg"], "did you mean 'gosgd'"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profile_command(arguments)


@pytest.mark.slow
def test_a_machine_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "choose_loads", lambda _, cores: choose_loads(20.0, cores))
    out = tmp_path / "profile.csv"
    num_threads = torch.get_num_threads()
    assert profile_command(["quickstart", "--out", str(out)]) == 0
    torch.set_num_threads(num_threads)
    found = Profile.read(out)
    assert len(found) == 16
    output = capsys.readouterr().out
    assert "samples/s" in output
    assert f"profile: {out}" in output
