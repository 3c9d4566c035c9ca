"""Recipes and studies of push-sum: equal steps for all, and nothing left out of the count."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from studies.compressed_push import (
    PAPER,
    SHORT,
    SlowLinkContest,
    contest_curves,
    difference_push,
    placings,
    table_iid,
    table_skew,
)
from studies.consensus import Grid, Unpacked, distance
from studies.contest import StudySettings

from edgegossip.algorithms.push_sum.difference_push import DifferencePush
from edgegossip.compression.compressor import Identity, PerLayer
from edgegossip.compression.sparse import TopK
from edgegossip.compression.values import BFloat16, Quantize, Sign
from edgegossip.contract.codec import num_bytes
from edgegossip.contract.protocol import Message
from edgegossip.contract.randomness import generator
from edgegossip.contract.topology import complete, directed_ring, ring
from edgegossip.data.partition import IID, BySubject, Dirichlet, LabelSkew
from edgegossip.data.readers import digits
from edgegossip.models import mlp
from edgegossip.recipes.push_sum_comparison import (
    DENSE,
    PushSettings,
    compare_pushes,
    compressor,
    schedule,
)
from edgegossip.runs.comparison import Traffic, compare
from edgegossip.runs.experiment import Comparison
from edgegossip.runs.scoreboard import score_table
from edgegossip.runs.study import Row

SETTINGS = PushSettings(num_epochs=2, num_workers=4, num_evaluations=4, compensation_rounds=2)


def recipe(**changes: Any) -> Comparison:  # noqa: ANN401
    return compare_pushes(digits(), partial(mlp, hidden=(8,)), replace(SETTINGS, **changes))


# Recipes.


@pytest.mark.slow
def test_all_runs_take_equal_steps_and_are_evaluated_as_often(tmp_path: Path) -> None:
    results = compare(recipe(local_steps=2), out=tmp_path, num_threads=0)
    assert list(results) == [
        DENSE,
        "sparse-push",
        "skew-compensated-sparse-push",
        "difference-push",
    ]
    last = [result.history[-1] for result in results.values()]
    assert {each.samples_processed for each in last} == {22 * 128}
    assert {len(result.history) for result in results.values()} <= {5, 6}
    assert max(each.bytes_sent for each in last) == last[0].bytes_sent


def test_rarer_messages_leave_the_steps_as_they_are_and_the_dense_run_too() -> None:
    algorithms: dict[str, Any] = {
        name: each.algorithm for name, each in recipe(local_steps=2).experiments.items()
    }
    assert [each.num_rounds for each in algorithms.values()] == [22, 11, 11, 11]
    assert algorithms[DENSE].local_steps == 1


@pytest.mark.parametrize("keep_ratio", [0.1, 0.01])
def test_compensation_adds_a_tenth_to_the_bytes(keep_ratio: float) -> None:
    changes = {"keep_ratio": keep_ratio, "compensation_rounds": None, "local_steps": 1}
    experiment = recipe(num_epochs=200, **changes).experiments["skew-compensated-sparse-push"]
    algorithm: Any = experiment.algorithm
    vector = torch.randn(60_000, generator=generator(1)) ** 3
    push, final = (
        num_bytes(Message("push", 0, compressor.compress(vector, 0)))
        for compressor in (algorithm.compressor, algorithm.compensation_compressor)
    )
    more = algorithm.compensation_rounds * final / (algorithm.num_rounds * push)
    assert 0.05 < more <= 0.1


def test_a_recipe_deals_its_samples_as_it_is_told() -> None:
    for changes, partition in (
        ({}, IID()),
        ({"skew": 0.8}, LabelSkew(0.8)),
        ({"dirichlet_alpha": 0.1}, Dirichlet(0.1)),
        ({"by_subject": True}, BySubject()),
    ):
        assert PushSettings(**changes).partition == partition


def test_a_recipe_is_compressed_as_it_is_told() -> None:
    assert compressor(1, 32) == Identity()
    assert compressor(0.01, 32) == TopK(0.01)
    assert compressor(0.01, 16) == TopK(0.01, BFloat16())
    assert compressor(0.5, 1) == TopK(0.5, Sign())
    assert compressor(1, 4) == Quantize(4)


def test_a_recipe_may_treat_each_layer_alone_and_take_nesterovs_momentum() -> None:
    experiment = recipe(per_layer=True, nesterov=True).experiments["sparse-push"]
    algorithm: Any = experiment.algorithm
    sizes = [each.numel() for each in experiment.task.models[""]().parameters()]
    assert algorithm.compressor.sizes == tuple(sizes)
    assert algorithm.compressor.inner == compressor(0.1, 4)
    optimizer: Any = experiment.task.optimizer
    assert optimizer.nesterov


def test_rates_begin_at_a_tenth_and_end_low() -> None:
    for decay, end in (("cosine", 0.0), ("steps", 0.01), ("constant", 1.0)):
        rate = schedule(decay, 20)  # type: ignore[arg-type]
        assert rate.factor(0.5 / 20) == pytest.approx(0.1, rel=0.01)
        assert rate.factor(1 / 20) > 0.9
        assert rate.factor(1.0) == pytest.approx(end)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_epochs": 0}, "num_epochs must be at least 1, got 0"),
        ({"global_batch": 127}, "multiple of num_workers=8, got 127; 8 workers may share 120"),
        ({"keep_ratio": 2.0}, r"keep_ratio must be in \(0, 1\], got 2.0"),
        ({"value_bits": 9}, "value_bits must be 1 to 8, 16 or 32, got 9"),
        ({"compensation_bits": 0}, "compensation_bits must be 1 to 8, 16 or 32, got 0"),
        ({"link": 0.0}, "link must be above 0 Mbit/s, got 0.0"),
        ({"skew": 0.8, "by_subject": True}, "choose one of skew, dirichlet_alpha"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PushSettings(**changes)


# What contests come to.


def row(run: str, num_bytes: int, **changes: Any) -> Row:  # noqa: ANN401
    traffic = {
        "bytes_sent": num_bytes,
        "samples_processed": 100,
        "num_workers": 8,
        "out_degree": 1.0,
    }
    values = {"group": "g", "setting": "s", "run": run, "seed": 0, "traffic": traffic}
    curve = {"times": [0.0, 10.0, 20.0], "accuracies": [0.1, 0.8, 0.9]}
    others = {"bytes_per_worker": [0.0, num_bytes / 16, num_bytes / 8]}
    return values | curve | others | {"worker_accuracies": [0.9, 0.8]} | changes


def test_a_run_is_set_beside_the_dense_one_of_its_seed() -> None:
    rows = [
        row(DENSE, 8000, times=[0.0, 500.0, 1000.0]),
        row(DENSE, 9000, seed=1),
        row("sparse-push", 80, worker_accuracies=[0.9, 0.6]),
        row("alone", 80, setting="other"),
    ]
    dense, _, sparse, alone = placings(rows)
    assert (dense["less"], dense["sooner"]) == (1.0, 1.0)
    assert dense["mean worker, lost"] == 0.0
    assert sparse["less"] == pytest.approx(100)
    assert sparse["less, complete graph"] == pytest.approx(700)
    assert sparse["sent per worker"] == 10
    assert (sparse["time to target"], sparse["sooner"]) == (20.0, 50.0)
    assert (sparse["averaged model"], sparse["worst worker"]) == (0.9, 0.6)
    assert sparse["mean worker, lost"] == pytest.approx(0.1)
    assert (alone["less"], alone["mean worker, lost"]) == (None, None)
    assert (alone["time to target"], alone.target) == (None, None)


def test_the_table_has_medians_and_dashes() -> None:
    never = {"accuracies": [0.1, 0.2, 0.3]}
    rows = [row(DENSE, 8000, seed=seed) for seed in (0, 1, 2)]
    rows += [row("sparse-push", 80 * (1 + seed), seed=seed, **never) for seed in (0, 1, 2)]
    table = score_table(placings(rows), heading="Ours", note="")
    assert table.columns[0] == ("run", "text")  # there is one part, in one setting
    titles = [title for title, _ in table.columns]
    lines = [dict(zip(titles, line, strict=True)) for line in table.rows]
    assert lines[1]["less"] == pytest.approx(50)
    assert lines[1]["time to target"] is None
    assert lines[0]["time to target"] == 20.0


def test_curves_leave_out_what_has_no_place_on_a_logarithmic_axis() -> None:
    by_bytes, by_time = contest_curves([row(DENSE, 8000)], ("g", "s", 0))
    assert by_bytes.series[0].x == (500.0, 1000.0)
    assert by_time.series[0].y == (0.8, 0.9)
    assert by_bytes.is_x_log
    assert by_bytes.x_unit == "bytes"


def test_bytes_on_another_graph_are_those_of_its_own_neighbors() -> None:
    dense = Traffic(bytes_sent=800, samples_processed=100, num_workers=8, out_degree=1.0)
    both = Traffic(bytes_sent=16, samples_processed=100, num_workers=8, out_degree=2.0)
    longer = Traffic(bytes_sent=16, samples_processed=200, num_workers=8, out_degree=None)
    assert both.ratios(dense) == {
        "bytes_ratio_same_graph": 100.0,
        "bytes_ratio_complete_graph": 350.0,
    }
    silent = Traffic(bytes_sent=0, samples_processed=0, num_workers=8, out_degree=1.0)
    assert set(dense.ratios(silent).values()) == {None}
    assert longer.ratios(dense) == {
        "bytes_ratio_same_graph": None,
        "bytes_ratio_complete_graph": 700.0,
    }


# Studies.


def test_studies_say_what_their_rows_depend_on() -> None:
    short = table_iid(StudySettings(short=True))
    [contest] = short.settings["contests"]
    runs = contest["runs"]
    assert runs[DENSE] == {
        "type": "Contender",
        "algorithm": "StochasticGradientPush",
        "topology": directed_ring(8).name,
        "local_steps": 1,
        "options": {},
        "has_momentum": True,
        "lr_factor": 1.0,
        "ending": None,
    }
    assert runs["sparse-push 10 % 32 bits"]["options"]["compressor"]["keep_ratio"] == 0.1
    assert table_skew().settings != table_skew(StudySettings(short=True)).settings


def test_a_study_may_treat_each_layer_alone() -> None:
    contest = SlowLinkContest(
        problem=SHORT,
        seed=0,
        setting="even data",
        partition=IID(),
        contenders={
            "whole": difference_push(PAPER),
            "parts": difference_push(PAPER, per_layer=True),
        },
    )
    experiments = [contest.experiment(Path("unread"), name) for name in contest.contenders]
    whole, parts = (cast("DifferencePush", each.algorithm).compressor for each in experiments)
    model = experiments[1].task.models[""]()
    assert whole == TopK(0.01)
    assert parts == PerLayer(TopK(0.01), tuple(each.numel() for each in model.parameters()))
    runs = contest.plain()["runs"]
    assert runs["whole"] != runs["parts"]  # so no folder of one is resumed as the other


def test_people_are_kept_together_at_seven_workers() -> None:
    skewed = [each for each in table_skew().settings["contests"] if each["group"] == "har-cnn"]
    assert [each["setting"] for each in skewed] == ["by subject"]
    assert {run["topology"] for run in skewed[0]["runs"].values()} == {
        directed_ring(7).name,
        ring(7).name,
        complete(7).name,
    }


NAMES = ("sparse-push", "difference-push")


def left(name: str, keep_ratio: float, step: float, num_rounds: int) -> float | None:
    targets = torch.randn(8, 20, generator=generator(0, "targets"))
    return distance(Grid(num_rounds=num_rounds), targets, name, 0.0, keep_ratio, step)


@pytest.mark.parametrize("name", NAMES)
def test_whole_vectors_come_together_as_fast_as_the_ring_mixes(name: str) -> None:
    # The second eigenvalue of a directed ring of 8 has modulus cos(pi / 8).
    ratio = left(name, 1.0, 1.0, 40)
    assert ratio is not None
    expected = math.cos(math.pi / 8) ** 40
    assert expected / 3 < ratio < 3 * expected


@pytest.mark.slow
def test_differences_end_in_agreement_and_error_feedback_at_some_distance() -> None:
    sparse, ours = (left(name, 0.2, 0.2, 400) for name in NAMES)
    assert ours is not None
    assert sparse is not None
    assert ours < 0.01 < sparse < 0.3


@pytest.mark.parametrize("name", NAMES)
def test_a_step_too_long_for_the_compression_brings_nobody_together(name: str) -> None:
    found = left(name, 0.1, 1.0, 60)  # and no warning, which tests would take for an error
    assert found is None or found > 0.5


def test_unpacked_vectors_are_those_that_are_packed() -> None:
    vector = torch.randn(50, generator=generator(0))
    packed = TopK(0.1)
    expected = packed.decompress(packed.compress(vector), 50)
    some = Unpacked(0.1)
    assert torch.equal(some.decompress(some.compress(vector), 50), expected)


@pytest.mark.parametrize("seeds", [(), (0, 1, 0)])
def test_a_study_needs_seeds_that_differ(seeds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="seeds must be one or more, all different"):
        StudySettings(seeds=seeds)
