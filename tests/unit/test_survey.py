"""A survey: what each machine does next, who is lost, and what the measurements amount to."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.outlooks import outlook

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank
from edgegossip.plan.machines import Machine, machines_text, read_machines
from edgegossip.plan.rehearsal import Costs
from edgegossip.plan.survey import (
    SILENCE,
    WAIT,
    MeasuredLink,
    Survey,
    Surveyor,
    confidence,
    fitted_latencies,
)

MEGABIT = 125_000.0


class Crowd:
    """Machines that ask a surveyor, at times that a test sets."""

    def __init__(self, *ranks: Rank, digest: str | None = None) -> None:
        self.surveyor = Surveyor(seconds=5.0, digest=digest)
        self.now = 0.0
        for rank in ranks:
            assert self.ask(rank) == WAIT

    def ask(self, rank: Rank, **said: Any) -> dict[str, Any]:  # noqa: ANN401
        given = {"digest": self.surveyor.digest, **said}
        return self.surveyor.asked(rank, f"m{rank}", given, self.now)

    def begin(self) -> None:
        self.surveyor.begin(self.now)

    def measure_links(self, *ranks: Rank) -> list[tuple[Rank, Rank]]:
        pairs = []
        while self.surveyor.phase == "links":
            [rank] = self.busy(*ranks)
            task = self.ask(rank)
            pairs.append((rank, task["to"]))
            self.ask(rank, id=task["id"], link=LINK)
        return pairs

    def measure_work(self, *ranks: Rank) -> None:
        tasks = {rank: self.ask(rank) for rank in ranks}
        for rank, task in tasks.items():
            assert (task["do"], task["seconds"], task["rate"]) == ("work", 5.0, 2e6)
            self.ask(rank, id=task["id"], costs=COSTS)

    def busy(self, *ranks: Rank) -> list[Rank]:
        return [rank for rank in ranks if self.ask(rank) != WAIT]


COSTS = {
    "speeds": [100.0, 110.0, 105.0],
    "seconds_per_training": 2e-3,
    "seconds_per_byte": 5e-8,
    "seconds_per_message": 3e-4,
}
LINK = {"round_trips": [0.02] * 20, "sent": [4e6, 5e6], "received": [2e6, 2e6]}


def test_links_are_measured_one_at_a_time_and_all_work_at_once() -> None:
    crowd = Crowd(0, 1, 3)
    crowd.begin()
    assert crowd.measure_links(0, 1, 3) == [(0, 1), (0, 3), (1, 3)]
    crowd.measure_work(0, 1, 3)
    assert crowd.surveyor.phase == "measured"
    survey = crowd.surveyor.survey()
    assert survey.names == {0: "m0", 1: "m1", 3: "m3"}
    assert [each.samples_per_second for each in survey.machines] == [105.0] * 3
    assert [each.mbits for each in survey.machines] == [16.0] * 3  # the slower direction
    assert [each.latency_ms for each in survey.machines] == [5.0] * 3
    assert [each.ms_per_training for each in survey.machines] == [2.0] * 3
    assert [each.ms_per_mb for each in survey.machines] == [50.0] * 3
    assert [each.ms_per_message for each in survey.machines] == [0.3] * 3


def test_an_instruction_is_repeated_until_it_is_reported() -> None:
    crowd = Crowd(0, 1)
    crowd.begin()
    crowd.measure_links(0, 1)
    task = crowd.ask(0)
    assert crowd.ask(0) == task
    assert crowd.ask(0, id=task["id"] + 5, costs=COSTS)["do"] == "work"
    assert crowd.ask(0, id=task["id"], costs=COSTS) == WAIT


def test_a_machine_that_is_silent_is_lost_and_the_others_go_on() -> None:
    crowd = Crowd(0, 1, 2)
    crowd.begin()
    crowd.measure_links(0, 1, 2)
    crowd.measure_work(0, 1)
    for _ in range(6):
        crowd.now += 10.0
        assert [crowd.ask(rank) for rank in (0, 1)] == [WAIT, WAIT]
    crowd.now += 6.0  # now it has taken longer than the measurement and its time limit
    assert crowd.busy(0, 1) == []
    assert "m2 is lost: nothing was heard" in crowd.surveyor.news[-1]
    assert crowd.surveyor.phase == "measured"
    assert [*crowd.surveyor.survey().names] == [0, 1]
    with pytest.raises(NetworkError, match="goes on without m2: nothing was heard"):
        crowd.ask(2)


def test_a_machine_that_waits_must_ask_too() -> None:
    crowd = Crowd(0, 1)
    crowd.now += SILENCE / 2
    crowd.ask(0)
    crowd.now += SILENCE / 2 + 0.1
    crowd.surveyor.tick(crowd.now)
    assert [*crowd.surveyor.present] == [0]
    assert crowd.ask(1) == WAIT  # nothing has been measured yet
    assert {*crowd.surveyor.present} == {0, 1}


def test_a_machine_that_a_link_does_not_reach_is_lost() -> None:
    crowd = Crowd(0, 1, 2)
    crowd.begin()
    task = crowd.ask(0)
    crowd.ask(0, id=task["id"], failed="worker 1 did not answer within 30 s")
    assert [*crowd.surveyor.present] == [0, 2]
    assert "m1 is lost: m0 says that worker 1 did not answer" in crowd.surveyor.news[-1]
    assert crowd.ask(0)["to"] == 2


def test_a_machine_that_is_left_alone_measures_nothing_more() -> None:
    crowd = Crowd(0, 1)
    crowd.begin()
    assert crowd.ask(0, id=crowd.ask(0)["id"], failed="worker 1 did not answer") == WAIT
    assert crowd.surveyor.phase == "measured"
    with pytest.raises(NetworkError, match="1 of 2 machines are left"):
        crowd.surveyor.survey()


def test_only_those_who_are_present_take_part_in_the_rehearsal() -> None:
    crowd = Crowd(0, 2, 3)
    crowd.begin()
    crowd.measure_links(0, 2, 3)
    assert [crowd.ask(rank)["present"] for rank in (0, 2, 3)] == [[0, 2, 3]] * 3


def test_a_machine_that_cannot_measure_its_work_is_lost() -> None:
    crowd = Crowd(0, 1)
    crowd.begin()
    crowd.measure_links(0, 1)
    with pytest.raises(NetworkError, match="goes on without m0: its loss is not finite"):
        crowd.ask(0, id=crowd.ask(0)["id"], failed="its loss is not finite")
    crowd.measure_work(1)
    assert crowd.surveyor.phase == "measured"
    with pytest.raises(NetworkError, match="1 of 2 machines are left"):
        crowd.surveyor.survey()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"speeds": each} for each in ([], [0.0], [math.nan], [-1.0], "fast", None, [[1.0]])),
        {"seconds_per_training": -1.0},
        {"seconds_per_byte": math.inf},
        {"seconds_per_byte": None},
        {"seconds_per_message": -1e-9},
    ],
)
def test_a_damaged_report_loses_only_its_sender(wrong: dict[str, Any]) -> None:
    crowd = Crowd(0, 1)
    crowd.begin()
    crowd.measure_links(0, 1)
    with pytest.raises(NetworkError, match="its measurement is damaged"):
        crowd.ask(0, id=crowd.ask(0)["id"], costs={**COSTS, **wrong})
    assert [*crowd.surveyor.present] == [1]


def test_another_recipe_file_is_refused() -> None:
    crowd = Crowd(0, digest="aa")
    with pytest.raises(NetworkError, match="recipe file of m1 is not that of this plan"):
        crowd.ask(1, digest="bb")
    assert [*crowd.surveyor.present] == [0]


def test_who_comes_after_the_beginning_is_too_late() -> None:
    crowd = Crowd(0, 1)
    crowd.begin()
    with pytest.raises(NetworkError, match="m2 comes too late"):
        crowd.ask(2)


def test_all_who_ask_are_told_to_start_as_often_as_they_ask() -> None:
    crowd = Crowd(0, 2)
    crowd.surveyor.decide({0: 0, 2: 1}, {"words": ["quickstart"], "num_workers": 2})
    for _ in range(2):
        assert crowd.ask(2) == {
            "do": "start",
            "words": ["quickstart"],
            "num_workers": 2,
            "rank": 1,
        }


def test_a_decision_is_only_for_those_whom_it_counts() -> None:
    crowd = Crowd(0, 1, 2)
    crowd.begin()
    crowd.measure_links(0, 1, 2)
    with pytest.raises(NetworkError, match="no loss"):
        crowd.ask(0, id=crowd.ask(0)["id"], failed="no loss")
    crowd.surveyor.decide({1: 0, 2: 1}, {"words": []})
    # By then, the signing service may know the machine by its new rank.
    assert crowd.surveyor.asked(0, "m1", {}, crowd.now)["rank"] == 0
    assert crowd.ask(1)["rank"] == 0
    assert crowd.ask(2)["rank"] == 1
    with pytest.raises(NetworkError, match="made without m0"):
        crowd.ask(0)


def test_all_who_ask_are_told_that_nothing_starts() -> None:
    crowd = Crowd(0, 1)
    crowd.surveyor.end("the answer was no")
    assert crowd.ask(1)["reason"] == "the answer was no"
    assert crowd.ask(0)["do"] == "end"


# What the measurements amount to.


def measured_link(
    latency: float, there: float, back: float | None = None, spread: float = 0.0
) -> MeasuredLink:
    rates = ((there * MEGABIT,), ((there if back is None else back) * MEGABIT,))
    return MeasuredLink(latency, spread, rates)


def survey(*mbits: float) -> Survey:
    """Machines behind cables of these Mbit/s, and of 1, 2, 3, ... ms."""
    pairs = [(i, j) for i in range(len(mbits)) for j in range(i + 1, len(mbits))]
    return Survey(
        names={rank: f"m{rank}" for rank in range(len(mbits))},
        costs={
            rank: Costs((100.0 * (rank + 1), 104.0 * (rank + 1)), 0.0, 0.0, 0.0)
            for rank in range(len(mbits))
        },
        links={
            (i, j): measured_link(1e-3 * (i + j + 2), min(mbits[i], mbits[j])) for i, j in pairs
        },
    )


def test_machines_have_the_cables_that_explain_the_pairs() -> None:
    found = survey(100.0, 50.0, 20.0, 20.0)
    # Nothing shows that the fastest is faster than its fastest link.
    assert [each.mbits for each in found.machines] == [50.0, 50.0, 20.0, 20.0]
    assert [each.latency_ms for each in found.machines] == pytest.approx([1, 2, 3, 4])
    assert found.misfit < 1e-6
    assert found.speed_spread == pytest.approx(4 / 102)


def test_two_machines_share_their_latency() -> None:
    assert fitted_latencies({(0, 1): 0.03}) == {0: 0.015, 1: 0.015}


def test_no_latency_is_below_zero() -> None:
    found = fitted_latencies({(0, 1): 0.001, (0, 2): 0.001, (1, 2): 0.04})
    assert found[0] == 0.0
    assert found[1] == pytest.approx(found[2])


def test_the_file_of_machines_reads_back(tmp_path: Path) -> None:
    found = survey(100.0, 50.0, 20.0)
    named = replace(found.machines[0], name='the "big" one\\', endpoint="tls/desk:7447")
    machines = (named, *found.machines[1:], Machine(name="as fast as this", speed=0.5))
    path = tmp_path / "machines.toml"
    path.write_text(machines_text(machines, [*found.notes, "guessed"]), encoding="utf-8")
    assert read_machines(path) == machines
    assert "# samples/s 4 %, transfers 0 %, round trips 0 %" in path.read_text()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ((1.0, 1.1), (2.0, 2.2), "100 % longer, the seeds' times of the two do not overlap"),
        ((1.0, 2.1), (2.0, 2.2), "5 % longer, the seeds' times of the two overlap"),
        ((1.0,), (2.0,), "each has one seed"),
        ((2.0, 2.01), (2.04, 2.05), "2 % longer, the seeds' times of the two do not overlap"),
    ],
)
def test_how_sure_the_first_place_is(
    first: tuple[float, ...], second: tuple[float, ...], said: str
) -> None:
    order = [outlook("a", max(first), first), outlook("b", max(second), second)]
    found = confidence(order, survey(10.0, 10.0))
    assert said in found
    assert "measured speeds varied by up to 4 %" in found
    is_sure = first == (1.0, 1.1)
    assert found.endswith("so the first place is sure" if is_sure else "is not sure")


def test_without_a_second_only_the_measurements_are_told() -> None:
    order = [outlook("a"), outlook("b", math.inf, (math.inf,))]
    found = confidence(order, survey(10.0, 10.0))
    assert found == "how sure: measured speeds varied by up to 4 %"
