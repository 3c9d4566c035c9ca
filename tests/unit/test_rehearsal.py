"""A rehearsal finds what the machines were made to cost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.small_tasks import regression
from torch import nn

from edgegossip.contract.protocol import Message, Rank, Received, Send, Trained, WorkerLost
from edgegossip.plan.rehearsal import PART, Costs, Rehearsal, costs
from edgegossip.runs.events import EventReader
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.sim.fault import Crash, Faults
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.optimizer import SGD

NUM_BYTES = 4 * (5 * 512 + 513)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 1))


def rehearsed(
    tmp_path: Path,
    *platforms: Platform,
    faults: Faults = Faults(),
    message_seconds: float = 0.13,
) -> list[Costs]:
    """The costs that workers on these platforms find; a step has eight samples."""
    experiment = Experiment(
        task=regression(model=model, optimizer=SGD(lr=1e-3)),
        algorithm=Rehearsal(
            num_workers=len(platforms), seconds=10.0, message_seconds=message_seconds
        ),
        platforms=platforms,
        links=Links(default=Link(latency=0.12)),
        faults=faults,
    )
    run(experiment, out=tmp_path / "run")
    notes = EventReader(tmp_path / "run" / "events.jsonl").of_type("noted")
    assert {note["kind"] for note in notes} == {PART}
    ranks = sorted({note["rank"] for note in notes})
    return [costs([note["numbers"] for note in notes if note["rank"] == j]) for j in ranks]


def dear(throughput: float = 400.0) -> Platform:
    """A step of 20 ms takes 10 ms more, a message 5 ms at both ends, and a model 40 ms more."""
    return Platform(
        throughput=throughput,
        seconds_per_training=0.01,
        seconds_per_byte=0.04 / NUM_BYTES,
        seconds_per_message=0.005,
    )


def test_a_rehearsal_finds_what_training_and_messages_cost(tmp_path: Path) -> None:
    one, other = rehearsed(tmp_path, dear(), Platform(throughput=800.0))
    assert one.speeds == pytest.approx([400.0] * 5)
    assert one.seconds_per_training == pytest.approx(0.01)
    # With their own few bytes, which take 1 ms.
    assert one.seconds_per_message == pytest.approx(0.006, rel=0.15)
    assert one.seconds_per_byte * NUM_BYTES == pytest.approx(0.04, rel=0.25)
    assert other.speeds == pytest.approx([800.0] * 5)
    assert other.seconds_per_training < 1e-9
    assert other.seconds_per_message < 0.001
    assert other.seconds_per_byte * NUM_BYTES < 0.001


def test_messages_go_to_those_who_are_there(tmp_path: Path) -> None:
    faults = Faults(script=(Crash(rank=1, at=0.5),), detection_time=0.2)
    found = rehearsed(tmp_path, dear(), dear(), dear(), faults=faults)
    assert [each.seconds_per_byte * NUM_BYTES for each in found] == pytest.approx(
        [0.04, 0.04], rel=0.25
    )
    assert [each.seconds_per_message for each in found] == pytest.approx(
        [0.006, 0.006], rel=0.15
    )


def test_small_messages_wait_for_the_slowest_so_that_none_pile_up() -> None:
    rehearsal = Rehearsal(num_workers=3, seconds=10.0, message_seconds=1.0)
    state = rehearsal.init(0, torch.zeros(3))
    state.round, small = 3, Message("small", 3, {"params": torch.zeros(3)})

    def receivers() -> list[Rank]:
        trained = Trained(
            params=state.params,
            before=state.params,
            num_samples=8,
            num_steps=1,
            seconds=0.01,
            loss=0.0,
        )
        effects = rehearsal.handle(state, trained, 0.1)
        return [each.receiver for each in effects if isinstance(each, Send)]

    assert receivers() == [1, 2]
    for _ in range(5):
        rehearsal.handle(state, Received(1, small), 0.1)
        assert receivers() == []  # worker 2 has sent none
    rehearsal.handle(state, Received(2, small), 0.1)
    assert (receivers(), receivers()) == ([1, 2], [])
    rehearsal.handle(state, WorkerLost(2), 0.1)
    assert (receivers(), state.part.messages) == ([1], 11)


def test_bytes_that_nobody_sends_cost_nothing(tmp_path: Path) -> None:
    for found in rehearsed(tmp_path, dear(), dear(), message_seconds=math.inf):
        assert found.seconds_per_byte == 0.0


def test_a_machine_whose_step_outlasts_a_part_does_one_cycle(tmp_path: Path) -> None:
    slow, fast = rehearsed(tmp_path, Platform(throughput=2.0), Platform(throughput=800.0))
    assert slow.speeds == pytest.approx([2.0])
    assert slow.seconds_per_training < 1e-9
    assert len(fast.speeds) == 5
    notes = EventReader(tmp_path / "run" / "events.jsonl").of_type("noted")
    # A part that does not count, and one of each kind, with a step of four seconds each.
    assert max(note["time"] for note in notes) == pytest.approx(20.0)


NO_MESSAGES = {"messages": 0, "bytes": 0}


def test_short_trainings_that_other_load_has_slowed_leave_a_speed() -> None:
    notes = [
        {"kind": 0, "seconds": 1.0, "samples": 160.0, "trainings": 10, **NO_MESSAGES},
        {"kind": 1, "seconds": 1.5, "samples": 80.0, "trainings": 10, **NO_MESSAGES},
        {"kind": 2, "seconds": 1.5, "samples": 80.0, "trainings": 10, **NO_MESSAGES},
        {"kind": 3, "seconds": 1.5, "samples": 80.0, "trainings": 10, **NO_MESSAGES},
    ]
    assert costs(notes) == Costs((320.0,), 0.05, 0.0, 0.0)


def test_the_bytes_of_models_cost_what_small_messages_do_not() -> None:
    notes = [
        {"kind": 0, "seconds": 1.0, "samples": 160.0, "trainings": 10, **NO_MESSAGES},
        {"kind": 1, "seconds": 1.0, "samples": 80.0, "trainings": 20, **NO_MESSAGES},
        {"kind": 2, "seconds": 1.5, "samples": 80.0, "trainings": 20}
        | {"messages": 50, "bytes": 0},
        {"kind": 3, "seconds": 1.5, "samples": 40.0, "trainings": 10}
        | {"messages": 10, "bytes": 90},
    ]
    found = costs(notes)
    assert found.seconds_per_message == pytest.approx(0.01)
    assert found.seconds_per_byte == pytest.approx(0.01)


def test_a_rehearsal_that_ends_early_tells_no_costs() -> None:
    with pytest.raises(ValueError, match="ended before a part of kind 'long'"):
        costs([])
