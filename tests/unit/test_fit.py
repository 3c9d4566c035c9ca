"""Warnings before a run that does not fit, and options that do not apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.small_runs import small_run

import edgegossip as eg
from edgegossip.cli.main import main
from edgegossip.recipes.call import RecipeCall
from edgegossip.runs import fit
from edgegossip.runs.fit import misfits_of_launch, misfits_of_simulation


class Little:
    """A machine with 1 MB of free memory."""

    available = 1e6


def many(only: str, number: int) -> eg.Experiment:
    arguments = {"num_workers": number, "num_epochs": 1}
    return RecipeCall("quickstart", arguments).experiment(only)


def test_a_complete_graph_of_many_workers_is_told() -> None:
    [line] = misfits_of_simulation(many("epoch-gossip", 400))
    assert "400 workers send 159,600 messages in each exchange" in line
    assert "--num-workers" in line
    # These send to one neighbor, and to two.
    assert [*misfits_of_simulation(many("gosgd", 400))] == []
    assert [*misfits_of_simulation(many("gossip", 400))] == []
    assert [*misfits_of_simulation(many("epoch-gossip", 100))] == []


def test_models_that_do_not_fit_into_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = many("gosgd", 100)
    monkeypatch.setattr(psutil, "virtual_memory", Little)
    [line] = misfits_of_simulation(experiment)
    assert "the models of 100 workers with 4,810 parameters need at least" in line


def test_more_processes_than_cores_or_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "num_cores", lambda: 2)
    [line] = misfits_of_launch(24)
    assert line.startswith("24 processes share 2 cores")
    assert [*misfits_of_launch(8)] == []
    monkeypatch.setattr(psutil, "virtual_memory", Little)
    [line] = misfits_of_launch(8)
    assert "8 processes need about 2.4 GB, and 0.0 GB are free" in line


def test_run_warns_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit, "MANY_MESSAGES", 5)
    words = ["run", "quickstart", "--num-workers", "3", "--num-epochs", "1", "--threads", "0"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().err
    assert told.startswith("warning: epoch-gossip: 3 workers send 6 messages in each exchange")


@pytest.mark.parametrize(
    "words",
    [
        ("run", "quickstart"),
        ("run", "quickstart", "--only", "gosgd"),
        ("compare", "quickstart", "--runs", "gosgd", "gossip"),
        ("launch", "quickstart", "-n", "2", "--only", "gosgd"),
        ("worker", "quickstart", "--rank", "0", "--only", "gossip"),
        ("sweep", "quickstart", "--only", "gosgd", "--lr", "0.1"),
    ],
)
def test_shared_is_refused_where_it_does_not_apply(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--shared", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "--shared is for edge-gossip, and not for " in told
    assert not (tmp_path / "out").exists()


def test_shared_is_taken_where_it_applies() -> None:
    call = RecipeCall("quickstart", {"shared": True})
    made: Any = call.make()
    call.require_used(*made.experiments.values())
    call.require_used(call.experiment("edge-gossip"))
    RecipeCall("quickstart").require_used(small_run("gosgd"))
