"""Reports of runs in stages: who worked and waited, what queued, how good gradients were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run_folders import Event, ended, evaluations, header, write_run
from tests.tiers import thorough
from tests.unit.test_report import PageReader, read_page, story_of

from edgegossip.report.folder import Run, read_folder
from edgegossip.report.log import AVERAGED, JOINED
from edgegossip.report.stages import (
    stage_pictures,
    stage_rows,
    stage_sentence,
    steady_state,
    worked_shares,
)

ROLES = ("stage-0", "stage-0", "stage-1", "stage-2")
STARTS = (0.0, 0.0, 1.0, 2.0)
"""When each rank begins; it then trains once a second for `SECONDS`, ten times."""
SECONDS = (0.5, 0.5, 1.0, 0.25)
NUM_BATCHES = 10


def stage_header(roles: tuple[str, ...] = ROLES, **changes: Any) -> Event:  # noqa: ANN401
    return {
        **header("decoupled", [100.0] * len(roles)),
        "roles": [*roles],
        "evaluated": [*range(len(roles))],
        "shard_sizes": [100 if role == "stage-0" else 0 for role in roles],
        **changes,
    }


def training(starts: tuple[float, ...] = STARTS) -> list[Event]:
    return [
        {
            "type": "trained",
            "time": start + index + seconds,
            "start": start + index,
            "rank": rank,
            "num_steps": 1,
            "num_samples": 8 if start == 0 else 0,
            "loss": 0.5,
        }
        for rank, (start, seconds) in enumerate(zip(starts, SECONDS, strict=True))
        for index in range(NUM_BATCHES)
    ]


def noted(time: float, rank: int, **numbers: float | None) -> Event:
    stage = max(0, rank - 1)
    counts = {"stage": stage, "num_trained": 1, **numbers}
    return {"type": "noted", "time": time, "rank": rank, "kind": "stage", "numbers": counts}


def queues(waiting: int, pending: int, **more: float | None) -> dict[str, float | None]:
    most = {"most_waiting": waiting + 1, "most_pending": pending + 1}
    return {"waiting": waiting, "pending": pending, "given_up": 0, **most, **more}


NOTES = [
    noted(1.0, 0, **queues(0, 3, batches=1)),
    noted(1.0, 1, **queues(0, 2, batches=1)),
    noted(3.0, 2, **queues(5, 1, batches=1, gradient_cosine=-0.2)),
    noted(4.0, 2, **queues(4, 1, batches=2, gradient_cosine=0.4)),
    noted(5.0, 2, **queues(4, 1, batches=3, gradient_cosine=0.6)),
    noted(5.0, 3, **queues(0, 0, batches=1)),
    noted(9.5, 0, **queues(0, 3, batches=10, given_up=4)),
    noted(9.5, 1, **queues(0, 3, batches=10)),
]


def run_of(folder: Path, *notes: Event, head: Event | None = None) -> Path:
    events = sorted([*training(), *notes], key=lambda event: event["time"])
    both = sorted([*events, *evaluations(events)], key=lambda event: event["time"])
    return write_run(folder, [head or stage_header(), *both, ended(12.0)])


def the_run(folder: Path) -> Run:
    return read_folder(folder).runs[0]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PageReader]:
    """A run with its report; tests only read it."""
    folder = run_of(tmp_path_factory.mktemp("report"), *NOTES)
    return folder, read_page(folder)


# Numbers.


def test_work_is_measured_from_when_all_have_begun_to_when_one_is_done(tmp_path: Path) -> None:
    folder = run_of(tmp_path, *NOTES)
    assert steady_state(the_run(folder)) == (2.0, 9.5)
    first, middle, last = stage_rows(read_folder(folder))
    assert first.worked == pytest.approx(4 / 7.5)
    assert first.waited == pytest.approx(3.5 / 7.5)
    assert middle.worked == pytest.approx(1.0)
    assert middle.waited == pytest.approx(0.0)
    assert last.worked == pytest.approx(8 * 0.25 / 7.5)


def test_a_stage_that_crashed_did_not_wait_meanwhile(tmp_path: Path) -> None:
    times = {"crashed": 5.375, "recovered": 5.875}
    faults = [{"type": what, "time": time, "rank": 3} for what, time in times.items()]
    row = stage_rows(read_folder(run_of(tmp_path, *faults)))[2]
    assert row.worked == pytest.approx(2 / 7.5)
    assert row.waited == pytest.approx(5 / 7.5)


def test_counts_are_of_all_ranks_and_queues_the_longest_of_one(tmp_path: Path) -> None:
    first, middle, last = stage_rows(read_folder(run_of(tmp_path, *NOTES)))
    assert [row.ranks for row in (first, middle, last)] == ["0 to 1", "2", "3"]
    assert (first.num_batches, first.num_given_up) == (20, 4)
    assert (first.most_waiting, first.most_pending) == (None, 4)
    assert (middle.most_waiting, middle.most_pending) == (6, 2)
    assert (last.most_waiting, last.most_pending, last.num_given_up) == (1, None, None)


def test_what_was_counted_before_a_restart_counts(tmp_path: Path) -> None:
    again = noted(9.9, 0, **queues(0, 1, batches=3, given_up=1))
    first = stage_rows(read_folder(run_of(tmp_path, *NOTES, again)))[0]
    assert (first.num_batches, first.num_given_up) == (23, 5)


def test_the_cosine_is_that_of_the_second_half(tmp_path: Path) -> None:
    first, middle, _ = stage_rows(read_folder(run_of(tmp_path, *NOTES)))
    assert middle.cosine == pytest.approx(0.5)
    assert first.cosine is None


def test_work_over_time_is_the_mean_of_those_who_hold_a_stage(tmp_path: Path) -> None:
    run = the_run(run_of(tmp_path))
    edges = np.array([0.0, 0.5, 1.0, 3.0, 12.0])
    shares = worked_shares([run.workers[rank] for rank in (0, 2)], edges)
    assert shares.tolist() == pytest.approx([0.5, 0.0, 0.75, (3.5 + 8.0) / 18])


def test_a_run_that_is_over_before_all_have_begun_is_measured_as_a_whole(
    tmp_path: Path,
) -> None:
    events = [event for event in training() if event["rank"] < 3]
    write_run(tmp_path, [stage_header(), *sorted(events, key=lambda e: e["time"]), ended(12.0)])
    run = the_run(tmp_path)
    assert steady_state(run) == (0.0, 12.0)
    rows = stage_rows(read_folder(tmp_path))
    assert rows[2].worked == 0.0
    assert rows[2].waited == pytest.approx(1.0)
    assert "stage 1 worked the most" in stage_sentence(run)


def test_a_run_in_which_no_time_passed_has_no_shares(tmp_path: Path) -> None:
    write_run(tmp_path, [stage_header(), ended(0.0)])
    assert {row.worked for row in stage_rows(read_folder(tmp_path))} == {None}
    assert list(stage_pictures(read_folder(tmp_path), {"decoupled": "#000000"})) == []
    assert stage_sentence(the_run(tmp_path)) == ""


# The page.


@thorough
def test_the_page_shows_stages_their_work_queues_and_gradients(
    shown: tuple[Path, PageReader],
) -> None:
    folder, reader = shown
    assert "The stages" in reader.text
    assert "0 0 to 1 53 % 47 % 20 4 \u2013 4 \u2013" in reader.text
    assert "1 2 100 % 0 % 3 0 6 2 0.5" in reader.text
    alts = " ".join(reader.alts)
    assert "decoupled: stage 0 worked 53\u00a0%, stage 1 worked 100\u00a0%" in alts
    assert "stage 0 4 unanswered, stage 1 6 waiting and 2 unanswered, stage 2 1 waiting" in alts
    assert "median of the second half. decoupled: stage 1 0.50." in alts
    names = {path.name for path in (folder / "figures").iterdir()}
    assert {"stage-work.svg", "stage-queues.svg", "stage-gradients.png"} <= names


@thorough
def test_all_stages_are_said_to_train_and_are_named(shown: tuple[Path, PageReader]) -> None:
    folder, reader = shown
    story = story_of(folder)
    assert "4 workers trained one model in 3 stages on 1,000 training samples" in story
    assert "stage 1 worked the most, 100 % of the time, and stage 2 waited the longest" in story
    alts = " ".join(reader.alts)
    assert "worker 1 of stage 0: training" in alts
    assert "stage 2: training" in alts
    assert the_run(folder).log.trainers == [0, 1, 2, 3]


def test_a_stage_that_crashed_is_called_so(tmp_path: Path) -> None:
    crashed = {"type": "crashed", "time": 11.0, "rank": 3}
    assert "Stage 2 crashed at 11 s" in story_of(run_of(tmp_path, crashed))


def test_models_are_joined_or_averaged_as_ranks_hold_them(tmp_path: Path) -> None:
    assert the_run(run_of(tmp_path / "several")).log.model == AVERAGED
    single = stage_header(("stage-0", "stage-1", "stage-2", "stage-3"))
    assert the_run(run_of(tmp_path / "single", head=single)).log.model == JOINED


def test_runs_without_stages_have_no_such_section(tmp_path: Path) -> None:
    folder = run_of(tmp_path, head={**stage_header(), "roles": ["worker"] * 4})
    assert stage_rows(read_folder(folder)) == []
    assert list(stage_pictures(read_folder(folder), {"decoupled": "#000000"})) == []


@pytest.mark.slow
def test_notes_that_say_nothing_of_queues_are_not_drawn(tmp_path: Path) -> None:
    folder = run_of(tmp_path, noted(3.0, 2, loss=0.5))
    names = [
        each.name for each in stage_pictures(read_folder(folder), {"decoupled": "#123456"})
    ]
    assert names == ["stage-work"]


@pytest.mark.slow
def test_runs_of_a_comparison_are_panels_of_the_same_figures(tmp_path: Path) -> None:
    whole = {**stage_header(), "name": "whole", "roles": ["worker"] * 4}
    run_of(tmp_path / "whole", head=whole)
    for number in range(5):
        run_of(tmp_path / f"staged-{number}", *NOTES)
    (tmp_path / "summary.json").write_text(json.dumps({"baseline": "whole"}), encoding="utf-8")
    reader = read_page(tmp_path)
    alts = " ".join(reader.alts)
    assert "staged-0: stage 0 worked 53\u00a0%" in alts
    assert "staged-4: stage 0 worked 53\u00a0%" in alts
    assert "whole: stage" not in alts
    names = {path.name for path in (tmp_path / "figures").glob("stage-*.svg")}
    assert names == {"stage-work.svg", "stage-queues.svg", "stage-gradients.svg"}


@pytest.mark.slow
def test_a_number_of_a_stage_that_is_damage_takes_no_memory(tmp_path: Path) -> None:
    head = stage_header(("stage-0", "stage-0", "stage-999999999", "stage-2"))
    reader = read_page(run_of(tmp_path, *NOTES, head=head))
    assert "999999999" in reader.text
