"""The queue of full-size experiments, with short cells."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.full_size import experiments, speeds, state
from benchmarks.full_size.cells import Cell, Machine, Rows
from benchmarks.full_size.forecast import Forecast, of_experiment
from benchmarks.full_size.queue import Alarm, Limits
from tests.full_size_cells import (
    ALWAYS,
    following,
    kept,
    long_cell,
    measuring,
    run_cell,
    short_cells,
    short_queue,
)
from tests.small_runs import ctrl_c_at, quick, small_run, with_rounds
from tests.tiers import thorough

from edgegossip.contract.errors import Interrupted, RunFolderError, TrainingError
from edgegossip.models import gpt, vgg11, vgg16
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run

A_MINUTE = Limits(minutes=1.0)


def until_done(out: Path, cells: list[Cell]) -> int:
    """Run the queue for a minute, again and again; return how often."""
    for number in range(1, 100):
        queue = short_queue(out, cells)
        queue.run(A_MINUTE)
        if all(queue.state(cell) == "done" for cell in cells):
            return number
    raise AssertionError("the queue makes no progress")


def undisturbed(out: Path, cells: list[Cell]) -> dict[str, Any]:
    assert short_queue(out, cells).run(ALWAYS)
    return kept(out)


def test_interrupted_after_each_minute_it_ends_with_the_results_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    cells = [run_cell("b", "gosgd")]
    whole = undisturbed(tmp_path / "whole", cells)
    assert until_done(tmp_path / "parts", cells) > 2
    assert kept(tmp_path / "parts") == whole


@thorough
def test_so_do_cells_of_all_kinds(tmp_path: Path) -> None:
    whole = undisturbed(tmp_path / "whole", short_cells())
    assert [*whole] == [
        "a-speed",
        "b-difference-push-seed0",
        "e-gosgd-seed0",
        "e-next-seed0",
    ]
    assert until_done(tmp_path / "parts", short_cells()) > 6
    assert kept(tmp_path / "parts") == whole


def test_ctrl_c_leaves_a_folder_with_which_the_queue_goes_on(tmp_path: Path) -> None:
    cells, said = [run_cell("b", "gosgd")], list[str]()
    whole = undisturbed(tmp_path / "whole", cells)
    out = tmp_path / "stopped"
    queue = short_queue(out, cells, said)
    with (
        ctrl_c_at(8, small_run("gosgd").algorithm),
        pytest.raises(Interrupted, match="b-gosgd"),
    ):
        queue.run(ALWAYS)
    assert queue.state(cells[0]) == "part"
    assert short_queue(out, cells).run(ALWAYS)
    assert kept(out) == whole
    assert not [*(out / "unfinished").glob("*")]


@thorough
def test_a_run_is_stopped_on_time_even_long_before_its_next_evaluation(tmp_path: Path) -> None:
    experiment = replace(with_rounds(small_run("gosgd"), 2000), evaluation_interval=1e6)
    for _ in range(2):  # only the first one begins with an evaluation
        alarm = Alarm(time.monotonic, at=0.0)
        with alarm.set(), pytest.raises(Interrupted):
            run(experiment, out=tmp_path, resume=True, progress=alarm)
        assert alarm.has_rung


def started(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.full_size_cells", str(out)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=thorough),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_so_does_a_signal_from_outside(tmp_path: Path, number: int) -> None:
    cell, out = long_cell(), tmp_path / "stopped"
    whole = undisturbed(tmp_path / "whole", [cell])
    log = out / "unfinished" / cell.name / "events.jsonl"
    with started(out) as process:
        while not (log.exists() and log.stat().st_size > 8_192):  # written in such pieces
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(number)
        _, complaint = process.communicate(timeout=300)
    if number == signal.SIGINT:
        assert "the same command goes on" in complaint
        assert short_queue(out, [cell]).state(cell) == "part"
    with started(out) as process:
        assert process.wait(timeout=300) == 0
    assert kept(out) == whole


@thorough
def test_killed_just_after_a_run_it_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [run_cell("b", "gosgd")]
    whole = undisturbed(tmp_path / "whole", cells)
    out = tmp_path / "killed"
    queue = short_queue(out, cells)

    def killed(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "_keep", killed)
    with pytest.raises(Interrupted):
        queue.run(ALWAYS)
    assert short_queue(out, cells).state(cells[0]) == "part"
    assert short_queue(out, cells).run(ALWAYS)
    assert kept(out) == whole


def test_a_run_killed_without_a_checkpoint_is_not_lost_silently(tmp_path: Path) -> None:
    cell, said = run_cell("b", "gosgd"), list[str]()
    (tmp_path / "unfinished" / cell.name).mkdir(parents=True)
    assert short_queue(tmp_path, [cell], said).run(ALWAYS)
    assert said[0] == "b-gosgd-seed0 was killed without a checkpoint, and begins anew"


def test_a_changed_cell_runs_again(tmp_path: Path) -> None:
    before, after = (run_cell("b", "gosgd", seed=seed) for seed in (0, 1))
    undisturbed(tmp_path, [before])
    assert short_queue(tmp_path, [after]).state(after) == "to do"
    assert kept(tmp_path)["b-gosgd-seed0"]["settings"]["seed"] == 0
    undisturbed(tmp_path, [after])
    assert kept(tmp_path)["b-gosgd-seed0"]["settings"]["seed"] == 1


def test_a_run_that_began_with_other_settings_begins_anew(tmp_path: Path) -> None:
    before, after = (run_cell("b", "gosgd", seed=seed) for seed in (0, 1))
    short_queue(tmp_path, [before]).run(A_MINUTE)
    said: list[str] = []
    short_queue(tmp_path, [after], said).run(ALWAYS)
    assert any("begun with other settings" in each for each in said)
    assert kept(tmp_path)["b-gosgd-seed0"]["settings"]["seed"] == 1


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_damaged_result_is_named_and_left_alone(tmp_path: Path, content: str) -> None:
    cells, said = [measuring("a-one", {}), measuring("a-two", {})], list[str]()
    (tmp_path / "a-one.json").write_text(content)
    short_queue(tmp_path, cells, said).run(ALWAYS)
    assert (tmp_path / "a-one.json").read_text() == content
    assert any("a-one.json is damaged" in each for each in said)
    assert (tmp_path / "a-two.json").exists()


def failing(name: str, error: Exception) -> Cell:
    def experiment(machine: Machine, rows: Rows) -> Experiment:
        raise error

    return Cell(name=name, settings={"name": name}, experiment=experiment)


def test_a_cell_that_fails_does_not_stop_the_queue(tmp_path: Path) -> None:
    diverged = failing("b-one", TrainingError("the loss is NaN"))
    broken = failing("b-two", RuntimeError("out of memory"))
    cells, said = [diverged, broken, measuring("c-three", {})], list[str]()
    queue = short_queue(tmp_path, cells, said)
    assert not queue.run(ALWAYS)
    # A failed training is a result; a lack of memory is not.
    assert [queue.state(cell) for cell in cells] == ["failed", "to do", "done"]
    assert kept(tmp_path)["b-one"]["error"] == "TrainingError: the loss is NaN"
    assert any("out of memory" in each for each in said)


def test_a_cell_after_a_failed_one_learns_of_it(tmp_path: Path) -> None:
    first = failing("b-one", TrainingError("the loss is NaN"))
    seen: list[Any] = []

    def experiment(machine: Machine, rows: Rows) -> Experiment:
        seen.append(rows)
        return quick()

    second = replace(following("b-two", first), experiment=experiment)
    assert short_queue(tmp_path, [first, second]).run(ALWAYS)
    assert seen[-1] == {"b-one": {"error": "TrainingError: the loss is NaN"}}


def forecast_of(sizes: dict[str, tuple[float, int | None]]) -> Any:  # noqa: ANN401
    """A forecast with these seconds and bytes of state, by name of the cell."""

    def forecast(cell: Cell, machine: Machine, rows: Rows) -> Forecast:
        seconds, num_bytes = sizes[cell.name]
        return Forecast(training=seconds, state_bytes=num_bytes, device="cpu")

    return forecast


def test_a_run_too_large_to_be_stopped_begins_only_if_it_fits_whole(tmp_path: Path) -> None:
    large, small = run_cell("b", "gosgd"), run_cell("c", "gosgd")
    forecast = forecast_of({large.name: (3600.0, 2**30), small.name: (60.0, 2**30)})
    said: list[str] = []
    queue = short_queue(tmp_path, [large, small], said, forecast=forecast)
    assert queue.run(Limits(minutes=30.0))
    assert [queue.state(cell) for cell in (large, small)] == ["to do", "done"]
    assert any("skipped b-gosgd" in each and "--state-mib 48" in each for each in said)
    assert short_queue(tmp_path, [large, small], forecast=forecast).run(ALWAYS)
    assert [queue.state(cell) for cell in (large, small)] == ["done", "done"]


def test_only_one_run_is_unfinished_at_a_time(tmp_path: Path) -> None:
    cells = [run_cell("b", "gosgd"), run_cell("c", "gosgd")]
    short_queue(tmp_path, cells).run(A_MINUTE)
    forecast = forecast_of({each.name: (3600.0, 1) for each in cells})
    said: list[str] = []
    queue = short_queue(tmp_path, [cells[1]], said, forecast=forecast)
    queue.run(Limits(minutes=10.0))
    assert queue.state(cells[1]) == "to do"
    assert any("b-gosgd-seed0 is unfinished" in each for each in said)


def test_it_says_what_it_will_run_before_it_starts(tmp_path: Path) -> None:
    said: list[str] = []
    short_queue(tmp_path, [run_cell("b", "gosgd")], said).run(ALWAYS)
    assert "measured first" in said[0]
    assert said[1].startswith("b-gosgd-seed0, about 1.0 min on cpu")
    assert "fits into" in said[1]


def test_a_forecast_starts_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    queue = short_queue(tmp_path, [run_cell("b", "gosgd")], said)
    queue.foretell()
    assert "would take about 1.0 min" in said[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["forecasts.json"]
    assert [*queue.listed()] == ["next     b-gosgd-seed0, about 1.0 min on cpu, state 0.0 MiB"]


@thorough
def test_a_forecast_takes_real_steps() -> None:
    experiment = small_run("difference-push")
    found = of_experiment(experiment, num_epochs=100.0, device="cpu")
    assert found.training > 0
    assert found.evaluations > 0
    assert found.state_bytes is not None
    assert found.state_bytes > 1000


# The state of an unfinished run.


def test_a_packed_state_is_exact_and_holds_equal_tensors_once() -> None:
    many, different = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0))
    tree = {
        "same": [many, many.clone()],
        "different": different,
        "others": (torch.empty(0, 3), torch.tensor(True), torch.tensor([[1, 2]])),
        "double": torch.tensor([0.1], dtype=torch.float64),
    }
    content = state.packed(tree)
    assert len(content) < 2 * many.nbytes
    found = state.unpacked(content)
    assert [torch.equal(each, many) for each in found["same"]] == [True, True]
    assert found["same"][0] is not found["same"][1]
    assert torch.equal(found["different"], different)
    for before, after in zip(tree["others"], found["others"], strict=True):
        assert isinstance(before, torch.Tensor)
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
    assert torch.equal(found["double"], torch.tensor([0.1], dtype=torch.float64))


def stopped(out: Path) -> Experiment:
    experiment = small_run("gosgd")
    with ctrl_c_at(20, experiment.algorithm), pytest.raises(Interrupted):
        run(experiment, out=out)
    return experiment


def test_a_state_is_kept_in_files_that_are_small_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FILE_BYTES", 4096)
    experiment = stopped(tmp_path / "run")
    num_bytes = state.pack(tmp_path / "run")
    files = sorted((tmp_path / "run").glob("*.bin"))
    assert len(files) > 1
    assert sum(each.stat().st_size for each in files) == num_bytes
    assert max(each.stat().st_size for each in files) <= 4096
    state.unpack(tmp_path / "run")
    results = run(experiment, out=tmp_path / "run", resume=True)
    whole = run(experiment, out=tmp_path / "whole")
    assert results.history == whole.history


def test_a_missing_or_damaged_file_of_a_state_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FILE_BYTES", 4096)
    stopped(tmp_path)
    state.pack(tmp_path)
    first, *_, last = sorted(tmp_path.glob("*.bin"))
    content = first.read_bytes()
    first.write_bytes(b"damaged" + content[7:])
    with pytest.raises(RunFolderError, match="is damaged"):
        state.unpack(tmp_path)
    first.write_bytes(content)
    last.unlink()
    with pytest.raises(RunFolderError, match=f"{last.name} is missing"):
        state.unpack(tmp_path)


# The cells.


@cache
def all_cells() -> tuple[Cell, ...]:
    return (*speeds.cells(), *experiments.cells())


@thorough
def test_cells_have_names_and_settings_of_their_own() -> None:
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells)
    assert len({cell.identity for cell in cells}) == len(cells)
    names = {cell.name for cell in cells}
    for cell in cells:
        assert (cell.experiment is None) != (cell.measure is None), cell.name
        assert names.issuperset(cell.after), cell.name
        assert json.loads(json.dumps(cell.settings)) == cell.settings, cell.name
    assert [*dict.fromkeys(cell.letter for cell in cells)] == [*"abcdefg"]


def test_seeds_share_their_forecast() -> None:
    name = "b-resnet20-even-sparse-push-seed"
    kinds = [cell.kind for cell in all_cells() if cell.name.startswith(name)]
    assert len(kinds) == 3
    assert len({*kinds}) == 1


def num_params(model: torch.nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def test_models_have_their_full_size() -> None:
    settings = experiments.GPT
    with torch.device("meta"):
        language = gpt(
            256,
            settings.context,
            width=settings.width,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
        )
        assert num_params(vgg11((3, 32, 32), 10)) == 9_488_266
        assert num_params(vgg16((3, 32, 32), 10)) == 14_982_474
    assert 124.0e6 < num_params(language) < 125.0e6
