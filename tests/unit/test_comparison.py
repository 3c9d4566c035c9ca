"""Several runs side by side: stopped, resumed, and never mixed up with single ones."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.small_runs import (
    ALGORITHMS,
    Recorder,
    ctrl_c_at,
    parameters,
    quick,
    repeatable_events,
)
from tests.tiers import thorough

from edgegossip.contract.errors import Interrupted, RunFolderError
from edgegossip.report.folder import read_folder
from edgegossip.runs.comparison import compare
from edgegossip.runs.experiment import Comparison
from edgegossip.runs.folder import RunFolder
from edgegossip.runs.runner import run


def comparison(**changes: Any) -> Comparison:  # noqa: ANN401
    names = ("epoch-gossip", "gosgd")
    settings: dict[str, Any] = {"baseline": "epoch-gossip"} | changes
    return Comparison(experiments={name: quick(name) for name in names}, **settings)


def test_a_comparison_sets_its_runs_side_by_side(tmp_path: Path) -> None:
    results = compare(comparison(target=0.4), out=tmp_path, num_threads=0)
    kept = json.loads((tmp_path / "summary.json").read_text())
    assert list(results) == list(kept["runs"]) == ["epoch-gossip", "gosgd"]
    for name, result in results.items():
        assert parameters(tmp_path / name)
        time = kept["runs"][name]["time_to_target"]
        assert time == result.time_to(0.4)
        if time:
            reference = results["epoch-gossip"].time_to(0.4)
            assert reference is not None
            assert kept["runs"][name]["speedup"] == reference / time
    assert kept["throughput_bound"] == pytest.approx(950 / 400)
    assert len(read_folder(tmp_path).runs) == 2


def test_a_target_follows_the_baseline_where_none_is_given(tmp_path: Path) -> None:
    results = compare(comparison(target_gap=0.25), out=tmp_path, num_threads=0)
    kept = json.loads((tmp_path / "summary.json").read_text())
    assert kept["target_accuracy"] == results["epoch-gossip"].best_accuracy - 0.25


@thorough
def test_bytes_are_set_beside_those_of_the_dense_run(tmp_path: Path) -> None:
    # On a ring of 4 each worker sends twice a round, in the complete graph three times.
    experiments = {"dense": quick("gossip"), "all-reduce": quick("all-reduce")}
    settings: dict[str, Any] = {"experiments": experiments, "baseline": "all-reduce"}
    compare(
        Comparison(**settings, bytes_reference="dense"), out=tmp_path / "with", num_threads=0
    )
    kept = json.loads((tmp_path / "with" / "summary.json").read_text())
    dense, all_reduce = (kept["runs"][name] for name in experiments)
    assert kept["bytes_reference"] == "dense"
    assert dense["bytes_ratio_same_graph"] == pytest.approx(1.0)
    assert dense["bytes_ratio_complete_graph"] == pytest.approx(1.5)
    assert dense["bytes_per_worker"] == dense["bytes_sent"] / 4
    per_sample = [run["bytes_sent"] / run["samples_processed"] for run in (dense, all_reduce)]
    assert all_reduce["bytes_ratio_complete_graph"] == pytest.approx(
        1.5 * per_sample[0] / per_sample[1]
    )
    compare(Comparison(**settings), out=tmp_path / "without", num_threads=0)
    runs = json.loads((tmp_path / "without" / "summary.json").read_text())["runs"]
    assert runs["dense"]["bytes_ratio_same_graph"] is None


def test_the_dense_run_must_be_there_and_send_after_each_step() -> None:
    experiments = {"dense": quick("gossip"), "gosgd": quick("gosgd")}
    with pytest.raises(ValueError, match=r"unknown bytes_reference 'dens'.*did you mean"):
        Comparison(experiments=experiments, baseline="dense", bytes_reference="dens")
    algorithm: Any = experiments["dense"].algorithm
    rare = replace(experiments["dense"], algorithm=replace(algorithm, local_steps=5))
    with pytest.raises(ValueError, match="local_steps=5; name a run that sends after each"):
        Comparison(
            experiments=experiments | {"dense": rare}, baseline="gosgd", bytes_reference="dense"
        )


@pytest.mark.parametrize("name", ["lr/0.1", "..", "", "edge[random]", "figures"])
def test_a_name_that_is_no_folders_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="which is also the name of its folder"):
        Comparison(experiments={name: quick("gossip")}, baseline=name)


@thorough
def test_a_comparison_stopped_in_its_second_run_goes_on_there(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    compare(comparison(), out=whole, num_threads=0)
    with ctrl_c_at(7, ALGORITHMS["gosgd"]), pytest.raises(Interrupted):
        compare(comparison(), out=stopped, num_threads=0)
    first = {p: p.read_bytes() for p in (stopped / "epoch-gossip").iterdir()}
    assert json.loads((stopped / "summary.json").read_text())["runs"].keys() == {"epoch-gossip"}
    summary = stopped / "gosgd" / "summary.json"
    assert json.loads(summary.read_text())["reason"] == "interrupted"
    header = json.loads((stopped / "gosgd" / "experiment.json").read_text())
    folder = RunFolder(stopped / "gosgd", header, resume=True)
    assert folder.finished_results() is None
    assert folder.checkpoint() is not None
    assert not summary.exists()  # no old numbers stay if what goes on is killed
    results = compare(comparison(), out=stopped, num_threads=0, resume=True)
    assert {p: p.read_bytes() for p in (stopped / "epoch-gossip").iterdir()} == first
    for name in results:
        assert repeatable_events(stopped / name) == repeatable_events(whole / name)
        assert parameters(stopped / name) == parameters(whole / name)


def test_a_comparison_stopped_in_its_first_run_begins_no_second(tmp_path: Path) -> None:
    class Last(Recorder):
        def update(self, status: Any) -> None:  # noqa: ANN401
            if status.share == 1:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        compare(comparison(), out=tmp_path, num_threads=0, progress=Last())
    assert not (tmp_path / "gosgd").exists()
    compare(comparison(), out=tmp_path, num_threads=0, resume=True)
    assert len(read_folder(tmp_path).runs) == 2


@thorough
def test_folders_of_runs_and_comparisons_are_not_mixed_up(tmp_path: Path) -> None:
    run(quick(), out=tmp_path / "run", num_threads=0)
    with pytest.raises(RunFolderError, match="holds a single run; choose another --out"):
        compare(comparison(), out=tmp_path / "run", num_threads=0)
    compare(comparison(), out=tmp_path / "comparison", num_threads=0)
    with pytest.raises(RunFolderError, match="already holds a run"):
        run(quick(), out=tmp_path / "comparison", num_threads=0)
    with pytest.raises(RunFolderError, match="already holds a run"):
        compare(comparison(), out=tmp_path / "comparison", num_threads=0)
    with pytest.raises(RunFolderError, match=r"there is no folder .* to resume"):
        compare(comparison(), out=tmp_path / "none", num_threads=0, resume=True)
