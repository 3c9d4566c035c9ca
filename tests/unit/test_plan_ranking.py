"""The ranking of a plan's candidates, and the reason why the first is first."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.outlooks import outlook

from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.plan.ranking import (
    Outlook,
    crossing,
    diverged,
    mean_crossing,
    ranked,
    reason,
    use_of_machines,
)
from edgegossip.recipes.parameter_servers import QUICKSTART, quickstart
from edgegossip.runs.runner import run
from edgegossip.runs.scoreboard import curve_fields


def row(run: str, seed: int, reached: float, **others: float) -> dict[str, Any]:
    """A run that is at 0.5 after half of the time, and at 0.9 from `reached` on."""
    return {
        "run": run,
        "seed": seed,
        "times": [reached / 2, reached, reached + 1.0],
        "accuracies": [0.5, 0.9, 0.9],
        "bytes": [0, 1000, 1000],
        "samples": [0, 400, 800],
        "joules": [10.0, 30.0, 50.0],
        "idle": 0.5,
        "uplink": 0.1,
        **others,
    }


def test_candidates_are_ordered_by_the_time_of_their_mean_accuracy() -> None:
    rows = [row("slow", s, t) for s, t in enumerate((4.0, 5.0, 6.0))]
    rows += [row("fast", s, t) for s, t in enumerate((1.0, 2.0, 3.0))]
    target, order = ranked(rows, target=0.7)
    assert target == 0.7
    assert [each.run for each in order] == ["fast", "slow"]
    assert order[0].times == (0.75, 1.5, 2.25)
    assert 0.75 < order[0].seconds < 2.25
    _, never = ranked(rows, target=0.95)
    assert all(math.isinf(each.seconds) for each in never)


def test_the_target_is_the_best_final_accuracy_less_a_point() -> None:
    rows = [row("one", 0, 1.0), {**row("two", 0, 1.0), "accuracies": [0.5, 0.99, 0.1]}]
    target, _ = ranked(rows, target=None)
    assert target == pytest.approx((0.5 + 0.9 + 0.9) / 3 - 0.01)


def test_bytes_samples_and_joules_are_those_up_to_the_target() -> None:
    _, [outlook] = ranked([row("run", 0, 2.0)], target=0.7)
    assert outlook.seconds == 1.5
    assert (outlook.num_bytes, outlook.samples, outlook.joules) == (500, 200, 20.0)


def test_a_run_that_diverged_comes_last() -> None:
    bad = {**row("bad", 0, 1.0), **diverged(ACCURACY)}
    assert math.isinf(mean_crossing([bad, row("bad", 1, 1.0)], 0.5))
    _, order = ranked([bad, row("good", 0, 1.0)], target=0.95)
    assert [each.run for each in order] == ["good", "bad"]
    assert math.isinf(crossing(bad, 0.1))


def test_the_time_to_a_target_is_told_with_its_range() -> None:
    times = (2.0, 1.0, math.inf)
    assert (
        outlook("a", seconds=2.0, times=times).time_text.replace("\u00a0", " ")
        == "2 s (1 to never)"
    )
    assert outlook("a", seconds=math.inf).time_text == "never"


def test_finalists_stay_before_those_with_fewer_seeds() -> None:
    lucky = row("lucky", 0, 1.0)
    final = [row("final", seed, 2.0 + seed) for seed in range(3)]
    _, order = ranked([lucky, *final[:1], *({**f, "is_final": True} for f in final[1:])], 0.7)
    assert [each.run for each in order] == ["final", "lucky"]


def started(run: str, *values: float, seed: int = 0, **others: Any) -> dict[str, Any]:  # noqa: ANN401
    """A run that is measured each second, from before training on."""
    return {**row(run, seed, 1.0), "times": [*range(len(values))], **others} | {
        "accuracies": [*values],
        "bytes": [1000 * each for each in range(len(values))],
        "samples": [400 * each for each in range(len(values))],
        "joules": [20.0 * each for each in range(len(values))],
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.10, 0.50, 0.50], 0.49),
        ([0.10, 0.115, 0.115], 0.105),
        ([0.10, 0.105, 0.105], 0.11),
        ([0.10, 0.10, 0.10], 0.11),
        ([0.10, 0.05, 0.05], 0.11),
    ],
)
def test_the_default_target_is_beyond_an_untrained_model(
    values: list[float], expected: float
) -> None:
    values = [values[0], *values[1:] * 3]
    target, order = ranked([started("a", *values), started("b", *values)], target=None)
    assert target == pytest.approx(expected)
    assert all(each.seconds > 0 for each in order)


def test_the_default_target_of_a_metric_where_less_is_better_is_beyond_it_too() -> None:
    metric = MetricSpec(name="perplexity", higher_is_better=False)
    slow = {**row("slow", 0, 1.0), **curve_fields(metric, [0.0, 1.0, 2.0], [8.0, 8.0, 7.99])}
    target, [outlook] = ranked([slow], target=None)
    assert target == pytest.approx(0.99 * 8.0)
    assert math.isinf(outlook.seconds)


# The reason.


def why(*order: Outlook) -> str:
    return reason(order).replace("\u00a0", " ")


def test_a_target_that_even_the_untrained_model_reaches_has_no_winner() -> None:
    _, order = ranked([started("a", 0.1, 0.4), started("b", 0.1, 0.5)], target=0.04)
    assert [each.run for each in order] == ["b", "a"]
    assert why(*order).startswith("Even the untrained model reaches the target")


NEVER: dict[str, Any] = {"seconds": math.inf, "times": (math.inf,)}


def test_the_reason_says_how_many_reach_the_target() -> None:
    first, late, lost = outlook("a"), outlook("b", seconds=4.0, idle=0.5), outlook("c", **NEVER)
    none = why(outlook("a, lr = 1", **NEVER), lost)
    assert none == "No candidate reaches the target; a, lr = 1 comes closest, with 90 %."
    assert why(first, lost).startswith("Only a reaches the target.")
    assert why(first, late, lost).startswith("a is first because 0 % of the machines'")
    assert why(first, late).startswith("a is first because")
    assert why(lost, late).startswith("No finalist reaches the target; c comes closest")


def test_one_that_waits_less_is_first_for_that() -> None:
    said = why(outlook("gosgd, p = 1"), outlook("bsp, lr = 1", seconds=4.0, idle=0.5))
    assert said.startswith(
        "gosgd is first because 0 % of the machines' capacity is idle, with bsp, the next, "
        "50 %, which wait for each other."
    )
    assert said.endswith("Its limit is the machines, which train nearly all the time.")


def test_one_whose_trainings_cost_less_time_is_first_though_it_idles_more() -> None:
    said = why(outlook("diloco", idle=0.2), outlook("gosgd", seconds=3.0, idle=0.0))
    assert "because it trains on 10,000 samples/s, gosgd, the next, on 6,700." in said


def test_one_that_sends_less_is_first_for_that() -> None:
    slow = outlook("all-reduce", seconds=8.0, idle=0.8, uplink=0.95, num_bytes=9e6)
    assert "whose busiest uplink sends for 95 % of it (9 MB to the target, not 1 MB)" in why(
        outlook("diloco"), slow
    )


def test_one_that_needs_fewer_samples_is_first_for_that() -> None:
    said = why(outlook("bsp", idle=0.4), outlook("gosgd", seconds=3.0, samples=8e4))
    assert "because it needs 20,000 training samples, gosgd, the next, 80,000" in said
    assert said.endswith(
        "Its limit is waiting: for slower machines, or for messages on their way."
    )


def test_the_limit_may_be_the_links() -> None:
    assert "Its limit is the links: the busiest uplink sends for 90 %" in why(
        outlook("bsp", idle=0.4, uplink=0.9)
    )


def test_a_server_is_idle_and_workers_that_wait_for_it_are(tmp_path: Path) -> None:
    """Two workers of very unequal speed with a barrier: the fast one waits."""
    settings = replace(QUICKSTART, num_workers=2, heterogeneity=1.9999, seconds=3.0)
    experiment = quickstart(settings).experiments["bsp"]
    speeds = [each.throughput for each in experiment.platforms]
    run(experiment, out=tmp_path / "bsp", num_threads=0)
    found = use_of_machines(tmp_path / "bsp", speeds)
    training = 2 * min(speeds)
    assert 1 - training / sum(speeds) < found["idle"] < 1 - 0.6 * training / sum(speeds)
    assert 0 < found["uplink"] < 0.2


def test_where_less_is_better_the_least_is_first_and_a_diverged_run_last() -> None:
    bits = MetricSpec(name="bits", higher_is_better=False)

    def of_bits(run: str, values: list[float]) -> dict[str, Any]:
        return row(run, 0, 1.0) | curve_fields(bits, [0.0, 1.0, 2.0], values)

    lost = row("lost", 0, 1.0) | diverged(bits)
    rows = [lost, of_bits("slow", [8.0, 4.0, 2.0]), of_bits("fast", [8.0, 2.0, 2.0])]
    target, order = ranked(rows, 2.5)
    assert target == 2.5
    assert [each.run for each in order] == ["fast", "slow", "lost"]
    assert [each.seconds for each in order[:2]] == [pytest.approx(5.5 / 6), 1.75]
    assert ranked(rows, None)[0] == pytest.approx(min(14, 12) / 3 * 1.01)
