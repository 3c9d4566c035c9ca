"""A plan: every candidate on machines like those that there are, and the best of them named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from edgegossip.cli import plan_command
from edgegossip.cli.main import main
from edgegossip.cli.plan_command import Outlook, advice, parse_plan, ranked
from edgegossip.core.errors import UsageError
from edgegossip.core.metric_spec import ACCURACY
from edgegossip.experiments.experiment import Comparison
from edgegossip.experiments.machine_list import Machine, links_between, read_machines
from edgegossip.recipes.recipe_settings import Settings
from edgegossip.recipes.registry import load_recipe

THREE = """
[[machine]]
name = "desk"
samples_per_second = 1000
mbits = 100
latency_ms = 5

[[machine]]
name = "phone"
count = 2
samples_per_second = 250.5
latency_ms = 20
"""


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    path = tmp_path / "machines.toml"
    path.write_text(THREE)
    return path


def test_machines_have_the_speeds_and_links_of_the_file(machines: Path) -> None:
    found = read_machines(machines)
    assert [each.name for each in found] == ["desk", "phone", "phone"]
    platforms = [each.platform(measured=1.0) for each in found]
    assert [each.throughput for each in platforms] == [1000, 250.5, 250.5]
    assert [each.uplink for each in platforms] == [12.5e6, math.inf, math.inf]
    links = links_between(found)
    assert links.overrides[0, 1].latency == pytest.approx(0.025)
    assert links.overrides[1, 2].latency == pytest.approx(0.040)


def test_a_machine_may_be_told_beside_this_one() -> None:
    assert Machine(name="phone", speed=0.5).platform(measured=300.0).throughput == 150.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must list machines"),
        ("machine = 3", "must list machines"),
        ("x = 1\n[[machine]]\nspeed = 1", "it has x, machine"),
        ("[[machine]]\nfast = 1", "no 'fast'; it may have name"),
        ("[[machine]]\nspeed = 'fast'", "speed of 'machine' must be a number"),
        ("[[machine]]\nspeed = 0", "speed must be above 0"),
        ("[[machine]]\ncount = 0", "count of 'machine' must be a number"),
        ("[[machine", "cannot read machines"),
    ],
)
def test_a_wrong_file_is_told_what_it_may_have(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_machines(path)


def test_a_recipe_with_a_server_gives_one_of_the_machines_to_it(machines: Path) -> None:
    words = ["adsp/quickstart", "--machines", str(machines)]
    _, _, candidates = parse_plan(words)
    assert candidates["adsp"].words == ("--num-workers", "2")
    _, _, peers = parse_plan(["quickstart", *words[1:]])
    assert peers["gosgd"].words == ("--num-workers", "3")


def forecast(run: str, *times: float, used: float = 1.0) -> Outlook:
    return Outlook(
        run=run, times=times, value=0.9, metric=ACCURACY, bytes_per_second=1.0, used=used
    )


def test_candidates_are_ordered_by_the_median_time_to_one_target() -> None:
    def row(run: str, seed: int, reached: float) -> dict[str, object]:
        times, accuracies = [reached / 2, reached], [0.5, 0.9]
        found = {"times": times, "accuracies": accuracies, "bytes": 1.0, "used": 0.5}
        return {"run": run, "seed": seed, **found}

    rows = [row("slow", s, t) for s, t in enumerate((4.0, 5.0, 6.0))]
    rows += [row("fast", s, t) for s, t in enumerate((1.0, 2.0, 9.0))]
    target, order = ranked(rows, target=None)
    assert target == pytest.approx(0.89)
    assert [(each.run, each.seconds) for each in order] == [("fast", 2.0), ("slow", 5.0)]
    _, never = ranked(rows, target=0.95)
    assert all(math.isinf(each.seconds) for each in never)


def test_the_plan_says_what_to_type_and_why(
    machines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = machines.parent / "out"
    words = ["plan", "quickstart", "--machines", str(machines), "--num-epochs", "1"]
    assert main([*words, "--lr", "0.02", "0.05", "--threads", "0", "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("best: ")
    start = next(line for line in said if line.startswith("on machine R"))
    assert "edgegossip worker quickstart --only" in start
    assert "--num-workers 3" in start
    assert "--machines" not in start
    found = json.loads((out / "study.json").read_text())
    assert len(found["cells"]) == 10
    assert found["tables"][0]["rows"][0][0] in said[1]


def test_a_plan_goes_on_with_the_speed_that_it_measured(
    machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = iter([300.0, 700.0])
    monkeypatch.setattr(plan_command, "measured_throughput", lambda _: next(speeds))
    machines.write_text("[[machine]]\ncount = 3\n")
    out = machines.parent / "out"
    words = ["quickstart", "--machines", str(machines), "--num-epochs", "1", "--threads", "0"]
    words += ["--out", str(out)]
    assert main(["plan", *words]) == 0
    settings = json.loads((out / "study.json").read_text())["settings"]
    assert settings["samples_per_second"] == 300.0
    assert main(["plan", *words, "--resume"]) == 0


def test_the_own_speed_is_measured_by_training() -> None:
    comparison = load_recipe("quickstart")(Settings())
    assert isinstance(comparison, Comparison)
    [experiment, *_] = comparison.experiments.values()
    assert plan_command.measured_throughput(experiment, seconds=0.01) > 100.0


def test_a_plan_does_not_go_on_with_other_settings(
    machines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = machines.parent / "out"
    words = ["plan", "quickstart", "--machines", str(machines), "--num-epochs", "1"]
    words += ["--threads", "0", "--out", str(out)]
    assert main(words) == 0
    assert main([*words, "--resume", "--held-out", "0.2"]) != 0
    assert "held_out" in capsys.readouterr().err


def test_where_nobody_reaches_the_target_the_plan_says_so() -> None:
    [line] = advice((0.99, [forecast("gosgd", math.inf)]), {})
    assert "no candidate reaches 99" in line
    assert "--target" in line


def test_a_slower_candidate_is_told_with_its_reasons(machines: Path) -> None:
    _, _, candidates = parse_plan(["quickstart", "--machines", str(machines)])
    order = [forecast("gosgd", 2.0), forecast("epoch-gossip", 5.0, used=0.5)]
    assert "uses 50% of the machines, not 100%" in "\n".join(advice((0.9, order), candidates))
