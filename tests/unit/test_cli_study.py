"""The command that does a study: its exit codes and its help."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from edgegossip.cli import study_command as study_cli
from edgegossip.cli.main import main
from edgegossip.contract.errors import TrainingError
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.study import Cell, Row, Session, Study


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders of which a page was drawn, by a study of three cells: done, failed, stopped."""
    pages: list[Path] = []

    def work(error: BaseException | None, session: Session) -> Row:
        if error is not None:
            raise error
        return {"value": 1}

    def make_study() -> Study:
        """Three cells.

        Args:
            none: There are none.
        """
        errors = {"done": None, "bad": TrainingError("nan"), "stopped": KeyboardInterrupt()}
        return Study(
            name="test/three",
            title="",
            printed=(),
            scaled_down=(),
            settings={},
            cells=tuple(
                Cell(name=name, group=name, work=partial(work, error))
                for name, error in errors.items()
            ),
            exhibit=lambda rows: Exhibits(),
        )

    monkeypatch.setattr(study_cli, "load_study", lambda name: make_study)
    monkeypatch.setattr(study_cli, "write_study_report", pages.append)
    return pages


@pytest.mark.parametrize(
    ("only", "code", "message"),
    [
        ("done", 0, ""),
        ("bad", 1, "1 of 1 cells failed, the first of them bad; the report says why"),
        ("stopped", 130, "interrupted in stopped; out holds everything so far"),
    ],
)
def test_a_study_always_leaves_a_page_and_says_how_it_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drawn: list[Path],
    capsys: pytest.CaptureFixture[str],
    only: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", "test/three", "--only", only, "--out", "out"]) == code
    assert message in capsys.readouterr().err
    assert drawn == [Path("out")]


def test_help_on_a_study_tells_of_options_and_not_of_arguments(
    drawn: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["study", "test/three", "--help"])
    said = capsys.readouterr().out
    assert "Three cells." in said
    assert "--resume" in said
    assert "Args:" not in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--depths", "7"], "depths must be in [3, 6], got 7"),
        (["--num-epochs", "0"], "num_epochs must be at least 1, got 0"),
    ],
)
def test_options_of_a_study_out_of_range_are_refused_before_a_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    out = tmp_path / "out"
    words = ["study", "synthetic-gradients/published", "--out", str(out), *options]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
