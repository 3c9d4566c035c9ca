"""Launches that cannot begin or whose workers cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from edgegossip.contract.errors import RunFolderError, TrainingError
from edgegossip.real.launch import launch
from edgegossip.recipes.call import pick
from edgegossip.recipes.registry import load_recipe


def nothing(*arguments: Any) -> list[str]:  # noqa: ANN401
    """The command of a worker that is none."""
    return ["--version"]


def failing(*arguments: Any) -> list[str]:  # noqa: ANN401
    return ["worker", "no-such-recipe"]


@pytest.mark.parametrize("name", ["events.jsonl", "workers/1/experiment.json"])
def test_the_folder_of_a_run_is_left_alone_without_resume(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("1\n2\n")
    experiment = pick("quickstart", load_recipe("quickstart")(), None)
    with pytest.raises(RunFolderError, match="already holds a run; choose another --out"):
        launch(experiment, nothing, out=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_simulated_run_is_not_resumed_on_real_processes(tmp_path: Path) -> None:
    experiment = pick("quickstart", load_recipe("quickstart")(), None)
    (tmp_path / "experiment.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text("{}\n{}\n")
    with pytest.raises(RunFolderError, match="holds a simulated run"):
        launch(experiment, nothing, out=tmp_path, resume=True)


@pytest.mark.slow
def test_workers_that_all_fail_are_one_error_with_what_they_said(tmp_path: Path) -> None:
    experiment = pick("quickstart", load_recipe("quickstart")(), None)
    with pytest.raises(TrainingError, match=r"all workers failed.*no-such-recipe.*log\.txt"):
        launch(experiment, failing, out=tmp_path)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_ends_the_workers_that_have_begun(
    tmp_path: Path,
) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "2").touch()
    experiment = pick("quickstart", load_recipe("quickstart")(), None)

    def forever(*arguments: Any) -> list[str]:  # noqa: ANN401
        return ["worker", "quickstart", "--rank", "0", "--out", str(tmp_path / "0")]

    with pytest.raises(RunFolderError, match=r"cannot write .*2.*choose another --out"):
        launch(experiment, forever, out=tmp_path)
    assert not psutil.Process().children()
