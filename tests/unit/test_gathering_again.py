"""A run folder that is gathered again: with a folder more, or over a simulated run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
from tests.small_runs import NUM_WORKERS
from tests.worker_folders import EXPERIMENT, make_folders, trained, write_lines

from edgegossip.contract.errors import RunFolderError
from edgegossip.real.gather import gather
from edgegossip.real.gathering import WORKERS
from edgegossip.real.worker_files import snapshot_path
from edgegossip.real.worker_folder import WorkerFolder
from edgegossip.runs.folder import load_results
from edgegossip.runs.results import Results


@pytest.fixture
def out(tmp_path: Path) -> Path:
    make_folders(tmp_path)
    return tmp_path


def write_ends(out: Path, *ranks: int) -> None:
    end = {"reason": "finished", "seconds": 1.2, "wall_seconds": 1.2, "mean_staleness": 0.0}
    params = EXPERIMENT.workload().initial_params()
    for rank in ranks:
        folder = out / WORKERS / str(rank)
        (folder / "summary.json").write_text(json.dumps(end))
        model = {"params": params * (rank + 1)}
        safetensors.torch.save_file(model, folder / "params.safetensors")


def gathered(out: Path) -> tuple[Results, list[str]]:
    results, left_out = gather(EXPERIMENT, out)
    assert isinstance(results, Results)
    return results, left_out


def test_a_folder_that_was_missing_is_copied_and_the_run_is_gathered_anew(out: Path) -> None:
    params = EXPERIMENT.workload().initial_params()
    for rank in range(NUM_WORKERS):
        write_lines(out, rank, trained(0.2, 8))
        for index in range(3):
            path = snapshot_path(out / WORKERS / str(rank) / "snapshots", index)
            safetensors.torch.save_file({"params": params * (rank + 1)}, path)
    write_ends(out, *range(NUM_WORKERS))
    other, elsewhere = out / WORKERS / "2", out / "elsewhere"
    other.rename(elsewhere)
    partial, left_out = gathered(out)
    assert "copy the folder of worker 2 there" in left_out[0]
    assert [each.samples_processed for each in partial.history] == [0, 24, 24, 24]
    assert len({each.loss for each in partial.history}) == 1
    snapshots = WorkerFolder(out / WORKERS / "0", 0).snapshots
    assert snapshots == [0, 1, 2]  # they are needed again
    elsewhere.rename(other)
    # A folder that arrives changes every moment, not only the end.
    whole, left_out = gathered(out)
    assert left_out == []
    assert [each.samples_processed for each in whole.history] == [0, 32, 32, 32]
    assert {each.loss for each in whole.history} == {whole.history[-1].loss}
    assert whole.history[-1].loss != partial.history[-1].loss
    assert len(whole.worker_values) == NUM_WORKERS
    assert load_results(out).history == whole.history
    assert WorkerFolder(out / WORKERS / "0", 0).snapshots == []
    again, _ = gathered(out)
    assert again.history == whole.history


def test_a_simulated_run_is_not_gathered_over(out: Path) -> None:
    (out / "experiment.json").write_text("{}")
    (out / "events.jsonl").write_text("{}\n{}\n")
    write_ends(out, *range(NUM_WORKERS))
    with pytest.raises(RunFolderError, match="holds a simulated run; choose"):
        gather(EXPERIMENT, out)
    assert (out / "events.jsonl").read_text() == "{}\n{}\n"
