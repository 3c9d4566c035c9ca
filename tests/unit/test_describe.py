"""An experiment as JSON: every setting that makes a difference is in it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.small_runs import ALGORITHMS, FAULTS, small_run, small_task

from edgegossip.contract.topology import ring
from edgegossip.data.hold_out import hold_out
from edgegossip.data.partition import Dirichlet
from edgegossip.data.pictures import flip_and_crop
from edgegossip.runs.describe import describe, header, source_commit
from edgegossip.runs.experiment import Comparison, Experiment, throughput_bound
from edgegossip.sim.fault import Crash, Drop, Faults, Partition
from edgegossip.sim.link import Link, Links
from edgegossip.sim.machines import profile
from edgegossip.sim.platform import Platform, uneven
from edgegossip.training.optimizer import SGD, Cosine

BASE = small_run()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (True, True),
        (None, None),
        (math.inf, None),
        (ring(5), "ring(5)"),
        (torch.zeros(2, 3), "tensor[2, 3]"),
        ((1, [2]), [1, [2]]),
        ({(0, 1): 2}, {"(0, 1)": 2}),
        (flip_and_crop, "flip_and_crop"),
        (partial(flip_and_crop, padding=2), {"type": "flip_and_crop", "padding": 2}),
        (torch.nn.Linear, "Linear"),
    ],
)
def test_values_are_said_in_json(value: object, expected: object) -> None:
    assert describe(value) == expected


def test_a_header_is_json_and_says_what_it_is_about() -> None:
    found = json.loads(json.dumps(header(small_run(faults=FAULTS), "mine"), allow_nan=False))
    assert found["recipe"] == "mine"
    assert found["algorithm"]["type"] == "Gossip"
    assert found["task"]["dataset"]["num_train"] == found["num_train"] == 64
    assert [platform["throughput"] for platform in found["platforms"]] == [400, 320, 130, 100]
    assert found["faults"]["script"][0] == {"type": "Crash", "at": 0.061, "rank": 1}
    assert set(found["versions"]) >= {"python", "torch", "edgegossip"}
    assert found["commit"] == source_commit()


CHANGES: list[dict[str, Any]] = [
    {"seed": 4},
    {"max_seconds": 9.0},
    {"evaluation_interval": 0.2},
    {"evaluation_interval": None, "evaluation_epochs": 0.5},
    {"name": "other"},
    {"algorithm": ALGORITHMS["gosgd"]},
    {"algorithm": replace(ALGORITHMS["gossip"], num_rounds=7)},  # type: ignore[type-var]
    {"platforms": uneven(4)},
    {"links": Links(overrides={(0, 1): Link(latency=1.0)})},
    {"faults": Faults(script=(Drop(probability=0.1),))},
    {"task": small_task(batch_size=9)},
    {"task": small_task(optimizer=SGD(lr=0.02))},
    {"task": small_task(partition=Dirichlet(0.1))},
    {"task": small_task(has_buffers=False)},
    {"task": small_task(schedule=Cosine())},
    {"task": small_task(augmentation=None)},
    {"task": small_task(model=torch.nn.Identity)},
]


@pytest.mark.parametrize("change", CHANGES, ids=", ".join)
def test_every_change_of_a_setting_shows(change: dict[str, Any]) -> None:
    assert header(replace(BASE, **change), None) != header(BASE, None)
    assert header(small_run(), None) == header(BASE, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"platforms": ()}, "platforms is empty"),
        ({"platforms": uneven(3)}, r"ring\(4\) has 4 workers, but there are 3 platforms"),
        ({"max_seconds": 0.0}, "max_seconds must be above 0 and finite, or None, got 0"),
        ({"max_seconds": math.inf}, "max_seconds must be above 0 and finite"),
        ({"evaluation_interval": math.nan}, "evaluation_interval must be above 0"),
        ({"evaluation_interval": math.inf}, "evaluation_interval must be above 0"),
        ({"evaluation_epochs": 1.0}, "give one of evaluation_interval and evaluation_epochs"),
        (
            {"faults": Faults(script=(Crash(at=0.0, rank=4),))},
            r"faults name worker 4; .* 0\.\.3",
        ),
        ({"faults": Faults(script=(Crash(at=0.0, rank=-1),))}, "faults name worker -1"),
        (
            {"faults": Faults(script=(Partition(start=0.0, end=1.0, group=(9,)),))},
            "faults name worker 9",
        ),
        ({"links": Links(overrides={(0, 7): Link()})}, "links name worker 7"),
        ({"profiles": {5: profile(Platform(throughput=1.0))}}, "profiles name worker 5"),
    ],
)
def test_an_experiment_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, **change)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baseline": "gosip"}, r"unknown baseline 'gosip'.*did you mean 'gossip'"),
        ({"target": 1.5}, r"target must be in \[0, 1\] or None, got 1.5"),
        ({"target_gap": -0.1}, r"target_gap must be in \[0, 1\]"),
    ],
)
def test_a_comparison_that_does_not_fit_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Comparison(**{"experiments": {"gossip": BASE}, "baseline": "gossip"} | settings)


def test_a_run_is_named_after_its_algorithm_or_as_it_is_told() -> None:
    names = {name: small_run(name).run_name for name in ALGORITHMS}
    assert names.pop("edge-squeeze") == "edge-gossip"  # which it is composed with
    assert names == {name: name for name in names}
    assert replace(BASE, name="mine").run_name == "mine"


def test_nobody_waiting_is_as_many_times_faster_as_speeds_differ() -> None:
    assert throughput_bound(uneven(4)) == 2.38
    assert throughput_bound(uneven(3, speeds=(2.0,))) == 1.0


def test_an_experiment_is_a_plain_value() -> None:
    assert isinstance(replace(BASE), Experiment)
    assert BASE.data_ranks == [0, 1, 2, 3]


def test_a_validation_split_is_described_where_there_is_one() -> None:
    data = small_run().task.dataset
    assert "num_validation" not in describe(data)
    assert (
        describe(hold_out(data, 0.25)).items()
        >= {"num_train": 48, "num_validation": 16}.items()
    )
