"""Our studies: what they run, and what they make of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from studies.contest import StudySettings
from studies.problems import DIGITS_MLP, MNIST_LENET5
from studies.race import (
    BASELINE,
    CONTROLS,
    EDGE_GOSSIP,
    Race,
    Setup,
    fast_and_slow,
    imbalanced,
    races_of,
    time_ratio,
)
from studies.speedup import skew, speedup
from studies.training import fig5, fig6, fig12
from tests.tiers import thorough

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.contract.topology import complete
from edgegossip.models import mlp
from edgegossip.recipes.baselines import HOME_LINK
from edgegossip.recipes.epoch_times import epoch_gossip_seconds
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.registry import load_study, studies
from edgegossip.report.study_page import write_study_report
from edgegossip.runs.exhibits import Exhibits
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.runs.study import Row, Study, run_study
from edgegossip.sim.link import Links
from edgegossip.sim.platform import uneven
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import RankedPerClass
from edgegossip.training.task import Workload

SHORT = StudySettings(short=True)
NOWHERE = Path("nowhere")  # digits need no file
TINY = replace(
    DIGITS_MLP,
    num_train=120,
    num_test=40,
    settings=replace(DIGITS_MLP.settings, num_epochs=2, batch_size=10),
)
# Small messages: nobody is through the next epoch before the last has its averages.
SMALL = replace(TINY, model=partial(mlp, hidden=(8,)))


@pytest.mark.slow
@pytest.mark.parametrize("name", studies())
def test_every_study_has_a_short_form_that_draws_a_page(name: str, tmp_path: Path) -> None:
    study = load_study(name)(SHORT)
    rows = run_study(study, out=tmp_path, num_threads=0)
    assert len(rows) == len(study.cells)
    page = write_study_report(tmp_path).read_text()
    assert "Not complete" not in page
    assert len(list((tmp_path / "figures").glob("*.svg"))) == 1
    again = run_study(study, out=tmp_path, num_threads=0, resume=True)
    assert again == json.loads(json.dumps(rows))
    assert write_study_report(tmp_path).read_text() == page


def test_loads_differ_by_seed_and_machine() -> None:
    setup = Setup(name="three", platforms=uneven(3, 100.0), runs={})
    two_seeds = replace(SHORT, seeds=(0, 1))
    loaded = races_of([TINY], lambda problem: (setup,), two_seeds, loaded=True)
    traces = {platform.trace for race in loaded for platform in race.setups[0].platforms}
    assert len(traces) == 6
    for idle in races_of([TINY], lambda problem: (setup,), two_seeds):
        assert idle.setups == (setup,)


@pytest.mark.parametrize("figure", [fig5, fig6, fig12])
def test_figures_under_load_add_runs_with_one_forecast(figure: Callable[..., Study]) -> None:
    idle, loaded = figure(SHORT), figure(SHORT, loaded=True)
    idle_runs, loaded_runs = ({cell.name for cell in each.cells} for each in (idle, loaded))
    added = {name.rpartition("/")[2] for name in loaded_runs - idle_runs}
    assert idle_runs < loaded_runs
    assert added == {"one-forecast", "one-forecast-no-profile"}
    assert loaded.settings["loaded"]
    assert not idle.settings.get("loaded")


def races(problem: Problem, **changes: Any) -> Study:  # noqa: ANN401
    ranked = AccuracyAware(selection=RankedPerClass())
    edge_gossip = replace(EDGE_GOSSIP, accuracy_aware=ranked)
    around = {"edge-gossip-gosgd": replace(edge_gossip, algorithm=GoSGD)}
    runs = {"edge-gossip": edge_gossip, **around, **CONTROLS}
    setups = (Setup(name="uneven", platforms=uneven(4), runs=runs),)
    settings: dict[str, Any] = {"problem": problem, "setups": setups, "seed": 0}
    race = Race(**settings | changes)
    return Study(
        name="test/race",
        title="",
        printed=(),
        settings={},
        cells=tuple(race.cells(NOWHERE)),
        exhibit=lambda rows: Exhibits(),
    )


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    rows = run_study(races(TINY), out=tmp_path_factory.mktemp("race"), num_threads=0)
    return {row["run"]: row for row in rows.values()}


def test_epoch_gossip_on_equal_platforms_says_all_about_uneven_ones(
    tmp_path: Path,
) -> None:
    study = races(SMALL, setups=(Setup(name="uneven", platforms=uneven(4), runs={}),))
    [row] = run_study(study, out=tmp_path / "study", num_threads=0).values()
    [_, *ends] = row["setups"]["uneven"]["epoch_ends"]
    direct = run(
        Experiment(
            task=SMALL.task(NOWHERE),
            algorithm=EpochGossip(topology=complete(4), num_rounds=2),
            platforms=uneven(4),
            links=Links(default=HOME_LINK),
            evaluation_interval=ends[0],
        ),
        out=tmp_path / "direct",
        num_threads=0,
    )
    found = {evaluation.time: evaluation.accuracy for evaluation in direct.history}
    assert [found[end] for end in ends] == row["accuracies"][1:]
    assert direct.virtual_seconds == ends[-1]


@thorough
def test_all_contenders_get_the_same_time(raced: dict[str, Row]) -> None:
    end = raced[BASELINE]["setups"]["uneven"]["epoch_ends"][-1]
    assert {row["times"][-1] for name, row in raced.items() if name != BASELINE} == {end}


@thorough
def test_rows_say_what_was_kept_and_what_looking_took(raced: dict[str, Row]) -> None:
    assert raced["edge-gossip"]["look_share"] > 0
    assert raced["edge-gossip-gosgd"]["look_share"] > 0
    assert raced["random"]["look_share"] == 0
    assert raced["gosgd"]["kept_shares"] is None
    kept = raced["random"]["kept_shares"]
    assert kept[0] == 1.0
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] <= 0.5  # batches of 10 in shards of 30 are coarse


def test_a_limit_of_work_is_kept_to(tmp_path: Path) -> None:
    setup = Setup(name="uneven", platforms=uneven(4), runs={"gosgd": CONTROLS["gosgd"]})
    study = races(TINY, setups=(setup,), max_work=0.5)
    [baseline, other] = run_study(study, out=tmp_path, num_threads=0).values()
    times = baseline["setups"]["uneven"]
    assert other["times"][-1] == 0.5 * times["epoch_ends"][-1] / times["throughput_bound"]
    # A kept row says what ran, and on which machines.
    assert other["contender"] == CONTROLS["gosgd"].plain(4)
    assert other["throughputs"] == [platform.total_throughput for platform in uneven(4)]


def test_an_epoch_takes_as_long_as_on_the_slowest() -> None:
    workload = Workload(SMALL.task(NOWHERE), range(4), seed=0)
    once, twice = (epoch_gossip_seconds(workload, uneven(4), HOME_LINK, k) for k in (1, 2))
    assert twice - once == pytest.approx(30 / 250)
    assert 30 / 250 < once < 30 / 250 + 0.01


@pytest.mark.parametrize(("limit", "value"), [("MANY", 4), ("MANY_MESSAGES", 1)])
def test_many_epochs_are_not_simulated_one_by_one(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(SMALL.task(NOWHERE), range(4), seed=0)
    whole = epoch_gossip_seconds(workload, uneven(4), HOME_LINK, 50)
    monkeypatch.setattr(f"edgegossip.recipes.epoch_times.{limit}", value)
    assert epoch_gossip_seconds(workload, uneven(4), HOME_LINK, 50) == pytest.approx(whole)
    endless = epoch_gossip_seconds(workload, uneven(4), HOME_LINK, 10**9)
    assert endless == pytest.approx(10**9 * 30 / 250)


def test_a_race_takes_place_on_machines_of_given_speeds() -> None:
    short = StudySettings(short=True, seeds=(0,))
    names = [cell.name for cell in speedup(short, speeds=(1.0, 0.5), controls="none").cells]
    assert names == [
        "digits-mlp/2-workers/seed0/epoch-gossip",
        "digits-mlp/2-workers/seed0/speeds-1-0.5/edge-gossip",
        "digits-mlp/2-workers/seed0/speeds-1-0.5/edge-gossip-auto",
        "digits-mlp/2-workers/seed0/speeds-1-0.5/edge-gossip-controlled",
    ]
    assert any(cell.name.endswith("random") for cell in speedup(short, speeds=(1, 0.1)).cells)
    on_skewed = skew(short, speeds=(1.0, 1.0))
    assert on_skewed.settings["speeds"] == (1.0, 1.0)
    name = "digits-dirichlet-1/2-workers/seed0/speeds-1-1/random-controlled"
    assert name in [cell.name for cell in on_skewed.cells]
    for study, speeds in product((speedup, skew), ((1.0,), (1.0, 0.0), (1.0, -1.0))):
        with pytest.raises(ValueError, match="speeds must"):
            study(short, speeds=speeds)


def test_a_race_is_as_long_as_it_is_told() -> None:
    [problem] = speedup(SHORT, num_epochs=7).settings["problems"]
    assert problem["num_epochs"] == 7
    [usual] = speedup(SHORT).settings["problems"]
    assert usual == DIGITS_MLP.plain()
    with pytest.raises(ValueError, match="num_epochs must be at least 1 or None, got 0"):
        speedup(SHORT, num_epochs=0)


def test_a_window_of_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match='window must be above 0, "auto" or None, got 0'):
        load_study("edgegossip/speedup")(SHORT, window=0.0)


# Rows of before.


@pytest.mark.parametrize(
    ("study", "group", "name"),
    [
        ("edgegossip/fig3", "cifar10-lenet5", "svd-kmeans/seed0"),
        ("edgegossip/fig3", "cifar10-alexnet-quarter", "cifar10-alexnet-quarter/pca-lsh/seed0"),
        ("edgegossip/fig7", "mnist", "mnist/isvd-lsh/ratio5/seed0"),
        ("edgegossip/fig8", "mnist-lenet5", "mnist-lenet5/seed0/accounted"),
        ("edgegossip/fig8", "mnist-lenet5", "mnist-lenet5/ratio20/seed0/measured"),
    ],
)
def test_cells_keep_their_names(study: str, group: str, name: str) -> None:
    assert name in {cell.name for cell in load_study(study)(StudySettings()).only(group).cells}


def test_rows_without_some_steps_are_still_drawn() -> None:
    technique = {"problem": "digits-mlp", "ratio": 10.0, "technique": "svd-kmeans", "seed": 0}
    technique |= {"num_points": 40, "accuracy": 0.9}
    generated = {"dataset": "digits", "technique": "svd-kmeans", "ratio": 5, "seed": 0}
    looked = {"problem": "digits-mlp", "ratio": 10, "seed": 0, "kind": "measured"}
    older = {
        "edgegossip/fig3": technique | dict.fromkeys(("wall_reduction", "wall_means"), 1.0),
        "edgegossip/fig7": generated | {"num_samples": 100, "wall_generation": 1.5},
        "edgegossip/fig8": looked | {"wall_share": 0.03},
    }
    found = {
        name: load_study(name)(SHORT).exhibit({"one": row}).tables[0].rows
        for name, row in older.items()
    }
    assert found == {
        "edgegossip/fig3": (
            ("digits-mlp", 10.0, "svd-kmeans", 1.0, None, 1.0, 40, 0.9, "selected"),
        ),
        "edgegossip/fig7": (("digits", 100, "svd-kmeans", 5, None, None, None, 1.5),),
        "edgegossip/fig8": (("digits-mlp", 10, None, None, None, 0.03),),
    }


# Settings.


def test_imbalance_is_what_was_asked_for() -> None:
    for imbalance in (1.0, 2.0, 4.0, 8.0):
        assert time_ratio(imbalanced(4, 100.0, imbalance)) == pytest.approx(imbalance)
    assert imbalanced(4, 100.0, 4.0) == uneven(4, 100.0)
    assert time_ratio(fast_and_slow(3)) == pytest.approx(3)
    with pytest.raises(ValueError, match="imbalance must be at least 1 and finite"):
        imbalanced(4, 100.0, 0.5)


def test_a_scaled_down_problem_takes_the_same_samples_each_time() -> None:
    first, second = (replace(TINY, num_test=n).load(NOWHERE) for n in (40, 50))
    assert len(first.train) == 120
    assert len(first.test) == 40
    assert first.train.labels.tolist() == second.train.labels.tolist()
    assert MNIST_LENET5.plain()["num_train"] is None
