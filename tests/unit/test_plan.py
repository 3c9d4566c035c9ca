"""A plan: every candidate tuned on machines like those that there are, and the best named."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.machine_lists import three_machines
from tests.outlooks import outlook
from tests.tiers import first, thorough

from edgegossip.cli.main import main
from edgegossip.cli.plan_command import parse_plan
from edgegossip.contract.errors import UsageError
from edgegossip.plan import planning, study as plan_study
from edgegossip.plan.grid import by_text
from edgegossip.plan.halving import Cost
from edgegossip.plan.machines import read_machines
from edgegossip.plan.planning import Plan, PlanSettings, make_plan
from edgegossip.plan.ranking import Outlook
from edgegossip.plan.results import advice, exhibits
from edgegossip.plan.study import best_of
from edgegossip.recipes.call import RecipeCall
from edgegossip.recipes.registry import load_recipe
from edgegossip.recipes.systems import SYSTEMS
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.experiment import Comparison
from edgegossip.runs.study import run_study
from edgegossip.runs.tuning import TUNING_SEED


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    return three_machines(tmp_path)


# Candidates.


def planned(machines: Path, *words: str, recipe: str = "quickstart") -> Plan:
    return parse_plan([recipe, "--machines", str(machines), *words])[1]


def test_a_recipe_with_a_server_gives_one_of_the_machines_to_it(machines: Path) -> None:
    plan = planned(machines, recipe="adsp/quickstart")
    assert plan.proposals["adsp"][0].call.arguments["num_workers"] == 2
    peers = planned(machines)
    assert peers.proposals["gosgd"][0].call.arguments["num_workers"] == 3


@pytest.mark.parametrize("name", first(1, ["one-slow", "churn", "stragglers", "halos"]))
def test_an_environment_whose_systems_have_other_machines_is_refused(
    machines: Path, name: str
) -> None:
    told = (
        rf"'environments/{name}' have different numbers of machines \(alone has 1, "
        r"[a-z-]+ has 3, [a-z-]+ has 4, halos has [0-9]\).*choose environments/own-machines"
    )
    with pytest.raises(UsageError, match=told):
        planned(machines, "--task", "digits", recipe=f"environments/{name}")


@thorough
def test_a_plan_knows_the_systems_of_the_environments(machines: Path) -> None:
    plan = planned(machines, "--task", "digits", recipe="environments/own-machines")
    assert {*plan.proposals} == {*SYSTEMS} - {"alone", "halos"}
    for name, proposals in plan.proposals.items():
        system = SYSTEMS[name]
        assert len(proposals) == 9  # three values of its setting, three rates
        tried = dict.fromkeys(each.setting.values[system.setting] for each in proposals)
        assert [*tried] == [*system.values]
        experiment = plan.fleet.experiment(proposals[0], seed=0)
        assert [each.throughput for each in experiment.platforms] == [1000, 250.5, 250.5]
        serves = experiment.roles[0] == "server"
        assert serves == (system.machines == "all and a server")
        number = proposals[0].call.arguments["num_workers"]
        assert f"--num-workers {number}" in proposals[0].command("launch", 5.0)


def test_each_algorithm_is_tried_with_its_own_settings_the_likeliest_first(
    machines: Path,
) -> None:
    plan = planned(machines)
    told = {
        only: [each.setting.label for each in some] for only, some in plan.proposals.items()
    }
    rates = ["0.05", "0.15", "0.0167", "0.45", "0.00556"]
    assert told["epoch-gossip"] == [f"lr = {rate}" for rate in rates]
    assert len(told["gosgd"]) == 15
    assert told["gosgd"][0] == "exchange-probability = 0.1, lr = 0.05"
    assert told["gosgd"][5] == "exchange-probability = 0.025, lr = 0.05"


@thorough
def test_typed_values_replace_those_of_the_recipe(machines: Path) -> None:
    words = ["--lr", "0.3", "--exchange-probability", "0.2", "0.3", "--batch-size", "8", "16"]
    plan = planned(machines, *words)
    assert [each.setting.label for each in plan.proposals["gossip"]] == [
        "batch-size = 8",
        "batch-size = 16",
    ]
    assert len(plan.proposals["gosgd"]) == 4
    assert plan.proposals["gosgd"][0].call.words()[1:3] == ["--lr", "0.3"]


def test_only_some_algorithms_may_be_planned_for(machines: Path) -> None:
    plan = planned(machines, "--only", "gosgd", "gossip")
    assert [*plan.proposals] == ["gosgd", "gossip"]
    with pytest.raises(UsageError, match=r"unknown algorithm 'gosg'.*did you mean 'gosgd'"):
        planned(machines, "--only", "gosg")


def test_a_run_is_as_long_as_the_machines_take_for_as_many_samples(machines: Path) -> None:
    plan = planned(machines, "--num-epochs", "4", recipe="systems/quickstart")
    assert plan.fleet.seconds == pytest.approx(4 * 0.97 * 1437 / 1501, rel=0.01)
    # The first machine serves; the recipe has two workers of 1000 and 333 samples a second.
    words = ["--seconds", "10", "--heterogeneity", "1.5"]
    served = planned(machines, *words, recipe="adsp/quickstart")
    assert served.fleet.seconds == pytest.approx(10 * 1500 / 501, rel=0.01)


def test_a_recipe_without_a_time_limit_needs_one(machines: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from dataclasses import replace\n"
        "from edgegossip.recipes.quickstart import DEFAULTS, quickstart\n"
        "def mine(settings=DEFAULTS):\n"
        "    found = quickstart(settings)\n"
        "    only = found.experiments['epoch-gossip']\n"
        "    return replace(found, experiments={'epoch-gossip': only}, tunable={})\n"
    )
    with pytest.raises(UsageError, match="no time limit; give --max-seconds"):
        planned(machines, recipe=f"{recipe}:mine")
    plan = planned(machines, "--max-seconds", "5", recipe=f"{recipe}:mine")
    assert plan.fleet.seconds == 5


def test_a_plan_is_made_from_python_without_a_command_line(machines: Path) -> None:
    call = RecipeCall("quickstart", {"batch_size": 8})
    settings = PlanSettings(only=("gossip",), max_seconds=0.5, budget="20runs", seeds=(4,))
    plan = make_plan(
        call, read_machines(machines), settings, values={"lr": by_text(0.1, 0.2, 0.4)}
    )
    [proposals] = plan.proposals.values()
    assert [each.label for each in proposals] == [
        f"gossip, lr = {lr}" for lr in (0.1, 0.2, 0.4)
    ]
    experiment = plan.fleet.experiment(proposals[1], seed=4)
    assert (experiment.task.batch_size, experiment.max_seconds, experiment.seed) == (8, 0.5, 4)
    assert plan.study.settings["arguments"] == ["--batch-size", "8"]
    assert {cell.run for cell in plan.study.cells if cell.group == "ranking"} == {"seed4"}


# The budget.


def test_a_budget_in_runs_is_shared_out_to_all(machines: Path) -> None:
    """Three runs rank each of six and six each of two; what is left is for tuning."""
    plan = planned(machines, "--budget", "48runs")
    whole_runs = plan.study.settings["whole_runs"]
    work = dict.fromkeys(plan.proposals, 0.0)
    for cell in plan.study.cells:
        if cell.group == "tuning":
            share = cell.work.keywords["share"]  # type: ignore[attr-defined]
            work[cell.name.split("/")[1]] += share
    assert all(2.5 <= each <= whole_runs + 1e-9 for each in work.values())
    assert 16.0 <= sum(work.values()) <= 18.0


def test_a_budget_in_time_buys_as_many_runs_as_it_takes(
    machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = Cost(start=0.0, whole=60.0)
    monkeypatch.setattr(planning, "measured_cost", lambda *_: cost)
    found = []
    for budget in ("15m", "0.5h"):
        words = ["--budget", budget, "--processes", "2", "--seeds", "0"]
        plan = planned(machines, *words)
        found.append(plan.wall_seconds or 0.0)
    assert 0.7 * 900 < found[0] <= 900
    assert 0.7 * 1800 < found[1] <= 1800


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (
            "10runs",
            "10runs is too small: 6 algorithms with 3 seeds need 30runs.*which they have",
        ),
        ("3", "20m"),
    ],
)
def test_a_budget_that_is_no_good_is_told(machines: Path, budget: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(machines, "--budget", budget)


def test_tuning_and_ranking_share_no_seed(machines: Path) -> None:
    plan = planned(machines, "--budget", "90runs")
    seeds = {
        group: {cell.run for cell in plan.study.cells if cell.group == group}
        for group in ("tuning", "ranking")
    }
    assert seeds["ranking"] == {f"seed{seed}" for seed in range(9)}
    assert seeds["tuning"].isdisjoint(seeds["ranking"])
    with pytest.raises(UsageError, match=f"below {TUNING_SEED}"):
        planned(machines, "--seeds", str(TUNING_SEED))


def test_each_rung_takes_the_best_of_the_one_before(machines: Path) -> None:
    plan = planned(machines, "--only", "gosgd")
    some = plan.proposals["gosgd"]

    def row(place: int, accuracy: float, seed: int = 0) -> dict[str, Any]:
        found = {"run": some[place].label, "algorithm": "gosgd", "seed": seed}
        return {**found, "times": [0.0, 1.0], "accuracies": [0.1, accuracy]}

    rows = {"a": row(0, 0.5), "b": row(1, 0.9), "c": row(2, 0.8)}
    assert [best_of(some, rows, None, place) for place in (0, 1)] == [some[1], some[2]]
    # A setting that diverged with some seeds is worse than one that did not.
    diverged = {**row(1, 0.0, seed=1), "times": [], "accuracies": []}
    rows |= {"d": diverged, "e": {**diverged, "seed": 2}}
    assert best_of(some, rows, None) == some[2]
    assert best_of(some, {}, None, place=3) == some[3]


# The command.


@thorough
def test_the_plan_says_what_to_type_and_why(
    machines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = machines.parent / "out"
    words = ["plan", "quickstart", "--machines", str(machines), "--max-seconds", "0.2"]
    words += ["--lr", "0.02", "0.05", "--only", "gosgd", "gossip", "--exchange-probability"]
    words += ["0.1", "--seeds", "0", "1", "--threads", "0", "--out", str(out)]
    # An average of the last third lags too far behind in so short a run.
    words += ["--budget", "8runs", "--target", "0.12", "--window", "None"]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("2 algorithms with 4 settings on 3 machines: ")
    best = next(line for line in said if line.startswith("best: "))
    assert "the first of 2 algorithms to reach 12" in best.replace("\u00a0", " ")
    assert " n = 2 seeds" in best
    assert any("3 of 3 lack, and --resume" in line for line in said)
    start = next(line for line in said if line.startswith("try it on this machine: "))
    assert "edgegossip launch quickstart --only" in start
    assert "--num-workers 3" in start
    assert "--max-seconds" in start
    assert "--machines" not in start
    found = json.loads((out / "study.json").read_text())
    assert found["summary"][0] == best
    assert best.split(",")[0] in (out / "report.html").read_text()
    # Two settings, and two seeds of the better one, of each algorithm.
    assert found["num_cells"] == 2 * (2 + 2)
    assert found["tables"][0]["rows"][0][0] in best
    assert len(found["tables"][1]["rows"]) == 4


def test_machines_with_endpoints_are_told_what_to_type_each(machines: Path) -> None:
    text = machines.read_text().replace("count = 2\n", 'endpoint = "tls/phone:7447"\n')
    machines.write_text(text.replace("mbits = 100", 'endpoint = "tls/desk:7447"'))
    plan = planned(machines, "--only", "gossip", "--num-workers", "2")
    [proposal, *_] = plan.proposals["gossip"]
    *_, once, desk, phone = advice(
        0.9, [outlook(proposal.label, 2.0, (2.0,))], plan.fleet, plan.proposals
    )
    assert desk.startswith("on desk: edgegossip worker quickstart --only gossip ")
    assert "edgegossip certs issue --rank 0 --rank 1;" in once
    assert desk.endswith(" --rank 0 --listen tls/desk:7447 --tls certs")
    assert phone.endswith(
        " --rank 1 --listen tls/phone:7447 --connect tls/desk:7447 --tls certs"
    )


@thorough
def test_a_plan_goes_on_with_what_it_measured(
    machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = iter([300.0, 700.0])
    costs = iter([Cost(0.0, 20.0), Cost(0.0, 1.0)])
    monkeypatch.setattr(planning, "measured_throughput", lambda _: next(speeds))
    monkeypatch.setattr(planning, "measured_cost", lambda *_: next(costs))
    machines.write_text("[[machine]]\ncount = 3\n")
    out = machines.parent / "out"
    words = [
        "quickstart",
        "--machines",
        str(machines),
        "--max-seconds",
        "0.2",
        "--threads",
        "0",
    ]
    words += [
        "--out",
        str(out),
        "--only",
        "gossip",
        "--lr",
        "0.1",
        "0.2",
        "--budget",
        "1m",
        "--seeds",
        "0",
    ]
    assert main(["plan", *words]) == 0
    before = json.loads((out / "study.json").read_text())
    assert before["settings"]["samples_per_second"] == 300.0
    assert main(["plan", *words, "--resume"]) == 0
    after = json.loads((out / "study.json").read_text())
    assert after["settings"] == before["settings"]
    assert after["cells"] == before["cells"]


def test_the_own_speed_is_measured_by_training() -> None:
    comparison = load_recipe("quickstart")(Settings())
    assert isinstance(comparison, Comparison)
    [experiment, *_] = comparison.experiments.values()
    assert plan_study.measured_throughput(experiment, seconds=0.01) > 100.0


def test_a_table_of_a_measured_machine_is_one_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "quickstart", "--measure", "0.01"]) == 0
    path = tmp_path / "machines.toml"
    path.write_text(2 * capsys.readouterr().out)
    assert len(read_machines(path)) == 2


@thorough
def test_the_time_of_whole_runs_is_told_by_their_beginnings(machines: Path) -> None:
    plan = planned(machines, "--only", "gossip", "--num-epochs", "2")
    [proposal, *_] = plan.proposals["gossip"]
    cost = plan_study.measured_cost(plan.fleet, proposal, seconds=0.0)
    whole = plan_study.measured_cost(plan.fleet, proposal, seconds=60.0)
    assert cost.start > 0
    assert 0.1 < whole.whole / cost.whole < 10


@thorough
def test_a_plan_does_not_go_on_with_other_settings(
    machines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = machines.parent / "out"
    words = ["plan", "quickstart", "--machines", str(machines), "--max-seconds", "0.1"]
    words += ["--threads", "0", "--out", str(out), "--only", "gossip", "--lr", "0.1"]
    words += ["--seeds", "0"]
    assert main(words) == 0
    assert main([*words, "--resume", "--held-out", "0.2"]) != 0
    assert "held_out" in capsys.readouterr().err


def test_plan_needs_machines_or_measures_one(machines: Path) -> None:
    with pytest.raises(UsageError, match="--measure 10 prints its table"):
        parse_plan(["quickstart"])
    with pytest.raises(UsageError, match="--measure 10 prints its table"):
        planned(machines, "--measure", "3")


# In words.


def said(plan: Plan, order: Sequence[Outlook]) -> str:
    return "\n".join(advice(0.9, order, plan.fleet, plan.proposals)).replace("\u00a0", " ")


def test_where_nobody_reaches_the_target_the_plan_says_so(machines: Path) -> None:
    plan = planned(machines)
    [line] = advice(0.99, [outlook("gosgd", math.inf, (math.inf,))], plan.fleet, plan.proposals)
    assert "no candidate reaches 99" in line
    assert "--target" in line


def test_a_target_that_needs_no_training_is_told(machines: Path) -> None:
    plan = planned(machines)
    [line] = advice(0.04, [outlook("gosgd", 0.0, (0.0,))], plan.fleet, plan.proposals)
    assert line.startswith("even the untrained model reaches 4")
    assert line.endswith("give a higher --target")


def test_the_time_limit_of_the_commands_is_told(machines: Path) -> None:
    plan = planned(machines, "--max-seconds", "12")
    [proposal, *_] = plan.proposals["gossip"]
    assert "these commands stop after 12 s" in said(
        plan, [outlook(proposal.label, 2.0, (2.0,))]
    )


def test_a_candidate_that_needs_less_energy_is_told(machines: Path) -> None:
    plan = planned(machines)
    [proposal, *_] = plan.proposals["gossip"]
    best = outlook(proposal.label, 2.0, (2.0,))
    frugal = outlook("gosgd", 3.0, (3.0,), joules=450.0)
    never = outlook("epoch-gossip", math.inf, (math.inf,), joules=1.0)
    told = said(plan, [best, frugal, never])
    assert (
        "note: gosgd needs less energy to the target, 450 J instead of 900 J, but 3 s" in told
    )
    assert "less energy" not in said(plan, [best, replace(frugal, joules=900.0), never])


@pytest.mark.parametrize("target", [0.04, 0.99])
def test_the_page_says_what_the_table_says(target: float) -> None:
    row = {"run": "a", "seed": 0, "times": [0.0, 1.0], "accuracies": [0.1, 0.3], "idle": 0.1}
    row |= {"bytes": [0, 9], "samples": [0, 9], "joules": [0.0, 9.0], "uplink": 0.1}
    table, *_ = exhibits(target, {"a": row, "b": {**row, "run": "b"}}).tables
    assert "first" not in table.note
    assert "Only" not in table.note
    told = "Even the untrained model reaches" if target < 0.5 else "No candidate reaches"
    assert told in table.note


def test_a_tie_and_a_single_seed_are_told(machines: Path) -> None:
    plan = planned(machines)
    [proposal, *_] = plan.proposals["gossip"]
    best = outlook(proposal.label, 2.0, (1.8, 2.3))
    near, far = outlook("gosgd", 2.4, (2.2, 2.6)), outlook("asp", 4.0, (3.9, 4.1))
    told = said(plan, [best, near, far])
    assert "after 2 s (1.8 to 2.3 s), n = 2 seeds; a tie, within the spread" in told
    assert "of the seeds, with gosgd\n" in told
    assert "gossip and gosgd differ by less than the seeds." in told
    assert "a tie" not in said(plan, [best, far])
    alone = said(plan, [outlook(proposal.label), outlook("gosgd", 2.0, (2.0,))])
    assert "with one seed (n = 1), so the order may be chance" in alone
    assert "a tie" not in alone


def test_commands_without_certificates_say_so(machines: Path) -> None:
    text = machines.read_text().replace("count = 2\n", 'endpoint = "tcp/phone:7447"\n')
    machines.write_text(text.replace("mbits = 100", 'endpoint = "tcp/desk:7447"'))
    plan = planned(machines, "--only", "gossip")
    [proposal, *_] = plan.proposals["gossip"]
    *_, desk, phone = advice(0.9, [outlook(proposal.label)], plan.fleet, plan.proposals)
    assert desk.endswith(" --listen tcp/desk:7447 --insecure")
    assert phone.endswith(" --connect tcp/desk:7447 --insecure")


def test_an_endpoint_may_be_added_to_a_plan_that_goes_on(machines: Path) -> None:
    before = planned(machines).study.settings
    text = machines.read_text().replace("mbits = 100", 'mbits = 100\nendpoint = "tls/desk:1"')
    machines.write_text(text)
    assert planned(machines).study.settings == before


def learned(run: str, *values: float, rung: int = 1) -> dict[str, Any]:
    times = [float(each) for each in range(len(values))]
    row = {"run": run, "algorithm": run.partition(",")[0], "seed": 0, "times": times}
    row |= {"accuracies": [*values], "idle": 0.1, "uplink": 0.1, "rung": rung, "num_rungs": 1}
    return row | {name: [0.0 for _ in values] for name in ("bytes", "samples", "joules")}


def test_runs_too_short_to_learn_do_not_tune(machines: Path) -> None:
    some = planned(machines).proposals["gosgd"]
    chance = [learned(each.label, 0.1, 0.1 + 0.001 * n) for n, each in enumerate(some)]
    rows = {str(number): row for number, row in enumerate(chance)}
    assert best_of(some, rows, None) == some[0]
    rows["4"] = learned(some[4].label, 0.1, 0.12)
    assert best_of(some, rows, None) == some[4]


def test_the_page_answers_once_all_have_been_ranked(machines: Path) -> None:
    plan = planned(machines, "--only", "gossip", "--seeds", "0", "--budget", "1runs")
    [proposal, *_] = plan.proposals["gossip"]
    [ranking] = [cell.name for cell in plan.study.cells if cell.group == "ranking"]
    tried = learned(proposal.label, 0.1, 0.101)
    assert plan.study.exhibit({"tuning": tried}).summary == ()
    row = {k: v for k, v in learned(proposal.label, 0.1, 0.9).items() if "rung" not in k}
    skipped = {**learned(proposal.label), "is_skipped": True}
    found = plan.study.exhibit({"tuning": tried, "skipped": skipped, ranking: row})
    assert found.summary[0].startswith(f"best: {proposal.label}, the first of 1 algorithms")
    notes = "\n".join(found.summary)
    assert "tuning was too short to tell settings of gossip apart" in notes
    assert "1 of 3 runs were left out" in notes
    [*_, machine_table] = found.tables
    assert [row[1:3] for row in machine_table.rows] == [
        ("desk", 1000),
        ("phone", 250.5),
        ("phone", 250.5),
    ]


def test_tuning_is_sorted_by_rung_and_value() -> None:
    rows = [learned("a", 0.1, 0.3), learned("a", 0.1, 0.5), learned("a", 0.1, 0.4, rung=2)]
    row = {k: v for k, v in learned("a", 0.1, 0.9).items() if "rung" not in k}
    _, tuning = exhibits(0.8, {**{str(n): x for n, x in enumerate(rows)}, "r": row}).tables
    assert [line[3] for line in tuning.rows] == [0.4, 0.5, 0.3]


def test_a_budget_in_time_leaves_out_runs_that_would_begin_too_late(
    machines: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning, "measured_cost", lambda *_: Cost(start=0.0, whole=1.0))
    words = ["--budget", "60s", "--processes", "1", "--only", "gossip", "--max-seconds", "0.05"]
    plan = planned(machines, *words)
    until, tuning_until = plan.fleet.until, plan.fleet.tuning_until
    assert until is not None
    assert tuning_until is not None
    assert time.time() < tuning_until < until <= time.time() + 60
    monkeypatch.setattr("edgegossip.plan.study.time.time", lambda: until + 1)
    rows = run_study(plan.study, out=tmp_path / "out")
    done = [name for name, row in rows.items() if not row.get("is_skipped")]
    assert done == ["gossip/seed0"]
    assert planned(machines, "--budget", "42runs").fleet.until is None


def test_a_best_value_at_an_end_of_those_tried_is_told(machines: Path) -> None:
    plan = planned(machines)
    proposals = plan.proposals["epoch-gossip"]
    told = {
        each.setting.label: said(plan, [outlook(each.label, 2.0, (2.0,))]) for each in proposals
    }
    assert "note: --lr 0.45 is the greatest value tried" in told["lr = 0.45"]
    assert "note: --lr 0.00556 is the least value tried" in told["lr = 0.00556"]
    assert "note" not in told["lr = 0.15"]
    assert "Only epoch-gossip reaches the target" in told["lr = 0.15"]


def test_a_switch_has_no_end(machines: Path) -> None:
    plan = planned(machines, "--shared", "True", "False", "--lr", "0.05")
    proposals = plan.proposals["edge-gossip"]
    assert {each.call.arguments["shared"] for each in proposals} == {True, False}
    for each in proposals:
        assert "note" not in said(plan, [outlook(each.label, 2.0, (2.0,))])


@thorough
def test_runs_are_judged_by_held_out_samples_or_the_test_split(machines: Path) -> None:
    plan = planned(machines)
    assert plan.study.exhibit({}).tables == ()
    fleet = replace(plan.fleet, held_out=0.0)
    [proposal, *_] = plan.proposals["gossip"]
    found = proposal.experiment(0, fleet.seconds).task.dataset
    assert len(fleet.experiment(proposal, seed=0).task.dataset.test) == len(found.test)
    held = plan.fleet.experiment(proposal, seed=0).task.dataset
    assert len(held.train) + len(held.test) == len(found.train)
