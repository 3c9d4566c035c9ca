"""A report tells what is in a run folder, and nothing that is not."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.run_folders import Event, comparison, ended, header, whole_run, write_run
from tests.tiers import thorough

from edgegossip.contract.errors import RunFolderError
from edgegossip.report import figures
from edgegossip.report.folder import read_folder
from edgegossip.report.page import render_page, write_report
from edgegossip.report.prose import highlights, notices, story
from edgegossip.report.style import figure_style, new_figure, run_colors
from edgegossip.report.timeline import kept_shares


class PageReader(HTMLParser):
    """Collects the words of a page, its images and whatever it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.alts: list[str] = []
        self.tags: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for key, value in attrs:
            if key in ("src", "href", "srcset", "data"):
                self.loads.append(value or "")
            if key == "alt":
                self.alts.append(value or "")

    def handle_data(self, data: str) -> None:
        if self.lasttag not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        """All words, each run of blanks made one space."""
        return " ".join(" ".join(self.words).split())


def read_page(folder: Path) -> PageReader:
    reader = PageReader()
    reader.feed(write_report(folder).read_text(encoding="utf-8"))
    return reader


def story_of(folder: Path) -> str:
    return " ".join(" ".join(story(read_folder(folder))).split())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with its report written; tests only read it."""
    folder = comparison(tmp_path_factory.mktemp("report") / "quickstart")
    write_report(folder)
    return folder


# The page.


def test_page_loads_nothing_from_anywhere(compared: Path) -> None:
    reader = PageReader()
    reader.feed((compared / "report.html").read_text(encoding="utf-8"))
    assert len(reader.alts) == 5
    assert all(reader.alts)
    assert all(load.startswith("data:") for load in reader.loads)
    assert not reader.tags & {"script", "iframe", "object"}
    assert "@import" not in (compared / "report.html").read_text(encoding="utf-8")


def test_each_figure_is_written_as_png_and_svg(compared: Path) -> None:
    names = {
        "accuracy-time",
        "accuracy-bytes",
        "accuracy-epochs",
        "timeline-all-reduce",
        "timeline-gossip",
    }
    files = {path.name for path in (compared / "figures").iterdir()}
    assert files == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert not list(compared.glob("**/*.part"))


def test_results_table_has_the_numbers_of_the_summary(compared: Path) -> None:
    summary = json.loads((compared / "summary.json").read_text(encoding="utf-8"))
    reader = PageReader()
    reader.feed((compared / "report.html").read_text(encoding="utf-8"))
    speedup = summary["runs"]["gossip"]["speedup"]
    assert "all-reduce baseline" in reader.text
    assert "Time to 90 %" in reader.text
    assert f"{speedup:.1f} ×" in reader.text  # noqa: RUF001 - what the page says
    assert "bound 3.8 ×" in reader.text  # noqa: RUF001


def test_results_table_has_ratios_of_bytes_where_there_are_some(tmp_path: Path) -> None:
    folder = comparison(tmp_path)

    def words() -> str:
        reader = PageReader()
        contents = read_folder(folder)
        colors = run_colors([run.name for run in contents.runs], contents.baseline)
        reader.feed(render_page(contents, colors, [], [], [], []))
        return reader.text

    without = words()
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    summary["runs"]["gossip"] |= {
        "worker_accuracy_mean": 0.8125,
        "bytes_ratio_same_graph": 66.7,
        "bytes_ratio_complete_graph": 466.7,
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    found = words()
    for text in ("467 ×", "66.7 ×", "81.2 %"):  # noqa: RUF001 - what the page says
        assert text in found
    assert "complete graph" in found
    assert "complete graph" not in without


@pytest.mark.slow
def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    first, second = (
        write_run(tmp_path / name, whole_run("gossip", has_barrier=False, num_rounds=3))
        for name in ("first", "second")
    )
    write_report(first)
    write_report(second)
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert len(files) == 10
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_text_from_the_data_is_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    experiment = header(name)
    experiment["platforms"][0]["name"] = name
    experiment["algorithm"][name] = name
    experiment["versions"][name] = name
    log = [experiment, ended(0.0, "failed", name)]
    reader = read_page(write_run(tmp_path / "run", log))
    assert "script" not in reader.tags
    assert reader.text.count(name) >= 5


def test_run_that_was_never_evaluated_has_a_page_without_curves(tmp_path: Path) -> None:
    reader = read_page(write_run(tmp_path / "run", [header("gossip"), ended(0.0)]))
    assert not reader.alts
    assert "no evaluation is in the log" in reader.text


def test_folder_may_be_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [header("gossip"), ended(0.0)])
    assert write_report(str(folder)) == folder / "report.html"


def test_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [header("gossip"), ended(0.0)])
    (folder / "figures").write_text("in the way", encoding="utf-8")
    with pytest.raises(
        RunFolderError, match=r"cannot write .*figures.*make room, or copy their folder"
    ):
        write_report(folder)


def test_failed_write_leaves_no_half_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [header("gossip"), ended(0.0)])
    (folder / "report.html").mkdir()
    with pytest.raises(RunFolderError, match="cannot write"):
        write_report(folder)
    assert not list(folder.glob(".*"))


# The story.


def test_story_names_the_winner_and_how_much_sooner_it_was(compared: Path) -> None:
    summary = json.loads((compared / "summary.json").read_text(encoding="utf-8"))
    gossip = summary["runs"]["gossip"]
    text = story_of(compared)
    assert "at 1,000, 500, 250 and 125 samples/s" in text
    assert "8.0 × as fast as the slowest" in text  # noqa: RUF001
    assert f"gossip reached 90 % accuracy first, after {gossip['time_to_target']:.3g} s" in text
    assert f"the baseline all-reduce took {gossip['speedup']:.1f} × as long" in text  # noqa: RUF001


def test_runs_that_arrive_at_the_same_look_are_both_first(
    compared: Path, tmp_path: Path
) -> None:
    tied = Path(shutil.copytree(compared, tmp_path / "tied"))
    path = tied / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    for run in summary["runs"].values():
        run["time_to_target"] = 2.5
    path.write_text(json.dumps(summary), encoding="utf-8")
    text = story_of(tied)
    names = " and ".join(summary["runs"])
    assert len(summary["runs"]) == 2
    assert f"{names} reached 90 % accuracy first, after 2.5 s" in text
    assert "followed by" not in text
    label = highlights(read_folder(tied))[0][1]
    assert " ".join(label.split()) == f"{names} to 90 % accuracy"


def balanced_run(num_rounds: int = 4) -> list[Event]:
    """Workers that take 250, 125, 62 and 31 of their 250 samples in a round, and never wait."""
    events: list[Event] = []
    for rank, num_samples in enumerate((250, 125, 62, 31)):
        for index in range(num_rounds):
            start = 0.25 * index
            trained = {"start": start, "num_steps": 1, "num_samples": num_samples, "loss": 0.5}
            sent = {"kind": "params", "round": index, "receivers": [0], "num_bytes": 9}
            end = start + 0.25
            events += [
                {"type": "trained", "time": end, "rank": rank, **trained},
                {"type": "sent", "time": end, "rank": rank, **sent, "start": end, "end": end},
            ]
    first = header("edge-gossip") | {
        "is_balanced": True,
        "shard_sizes": [250] * 4,
    }
    return [first, *sorted(events, key=lambda event: event["time"]), ended(0.25 * num_rounds)]


def test_story_names_who_waited_before_and_what_each_keeps_now(tmp_path: Path) -> None:
    folder = comparison(tmp_path)
    write_run(folder / "edge-gossip", balanced_run())
    text = story_of(folder)
    assert re.search(
        r"In all-reduce, worker 0 \(1,000 samples/s\) spent \d\d % of its time waiting for "
        r"worker 3, the slowest \(125 samples/s\)",
        text,
    )
    assert "workers 0 to 3 kept 100 %, 50 %, 25 % and 12 % of their data" in text
    assert re.search(r"The longest wait was that of worker \d, 0 % of its time", text)
    assert "kept" not in story_of(comparison(tmp_path / "without"))


def test_a_round_that_was_cut_off_does_not_count_as_kept(tmp_path: Path) -> None:
    log = balanced_run()
    extra = next(event for event in log if event["type"] == "trained") | {"time": 1.1}
    run = read_folder(write_run(tmp_path, [*log[:-1], extra, ended(1.1)])).runs[0]
    assert kept_shares(run) == pytest.approx([1.0, 0.5, 0.248, 0.124])


def test_before_the_first_round_is_over_nothing_was_kept(tmp_path: Path) -> None:
    log = [balanced_run()[0], ended(0.1)]
    assert kept_shares(read_folder(write_run(tmp_path, log)).runs[0]) is None


def test_target_that_nobody_reached_is_not_called_reached(tmp_path: Path) -> None:
    folder = comparison(tmp_path)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    summary["target_accuracy"] = 0.999
    for run in summary["runs"].values():
        run.update(time_to_target=None, speedup=None)
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    text = story_of(folder)
    assert "No run reached the target of 99.9 %." in text
    assert "as long" not in text


def test_story_of_one_run_takes_its_target_from_the_summary(tmp_path: Path) -> None:
    summary = {"name": "gossip", "target_accuracy": 0.9}
    folder = write_run(tmp_path, whole_run("gossip", has_barrier=False), summary)
    assert "gossip reached its target of 90 % after" in story_of(folder)
    assert highlights(read_folder(folder))[0][1].split() == ["to", "90", "%", "accuracy"]


def test_the_headline_is_the_end_and_not_a_peak_on_the_way(tmp_path: Path) -> None:
    events = whole_run("gossip", has_barrier=False)
    peak = next(each for each in events if each["type"] == "evaluated")
    peak["accuracy"] = 0.99
    value, label = highlights(read_folder(write_run(tmp_path, events)))[0]
    end = [each["accuracy"] for each in events if each["type"] == "evaluated"][-1]
    assert value.split() == [f"{100 * end:.1f}", "%"]
    assert label.split() == [
        "accuracy",
        "at",
        "the",
        "end;",
        "best",
        "value",
        "during",
        "the",
        "run",
        "99",
        "%",
    ]


def test_without_a_target_no_column_speaks_of_one(tmp_path: Path) -> None:
    contents = read_folder(write_run(tmp_path, whole_run("gossip", has_barrier=False)))
    page = PageReader()
    page.feed(render_page(contents, run_colors(["gossip"], None), [], [], [], []))
    assert "target" not in page.text
    assert "Time to" not in page.text
    assert "EdgeGossip" not in page.text


def crossed(folder: Path) -> int:
    """How many curves the target's label lies on, in the figure over time."""
    contents = read_folder(folder)
    with figure_style():
        axes = new_figure(9.0, 4.6).add_subplot()
        for run in contents.runs:
            axes.plot(
                [each.time for each in run.log.evaluations],
                [each.value for each in run.log.evaluations],
            )
        label = figures.label_target(axes, contents.target or 0.0, contents.metric)
    box = label.get_window_extent()
    return sum(
        line.get_path().transformed(line.get_transform()).intersects_bbox(box, filled=False)
        for line in axes.lines
    )


@pytest.mark.parametrize("target", [0.5, 0.9, 0.93])
def test_the_label_of_the_target_lies_on_no_curve(tmp_path: Path, target: float) -> None:
    assert crossed(comparison(tmp_path, target=target)) == 0


@thorough
def test_a_flat_curve_has_labels_that_differ(tmp_path: Path) -> None:
    run = [event | {"accuracy": 1.0} for event in whole_run("gossip", has_barrier=False)]
    contents = read_folder(write_run(tmp_path / "flat", run))
    picture = next(figures.metric_pictures(contents, {"gossip": "blue"}))
    shares = re.findall(r"<!-- ([0-9.]+)\s?% -->", picture.svg.decode())
    assert len(shares) > 2
    assert len({*shares}) == len(shares)


def test_faults_are_told(tmp_path: Path) -> None:
    lost = {"type": "lost", "sender": 1, "rank": 2, "kind": "params"}
    log = [
        header("gossip"),
        {"type": "crashed", "time": 1.0, "rank": 2},
        *({**lost, "time": 1.5, "reason": "crashed"} for _ in range(3)),
        {**lost, "time": 1.5, "reason": "dropped"},
        {"type": "recovered", "time": 2.0, "rank": 2},
        {"type": "crashed", "time": 3.0, "rank": 0},
        ended(4.0),
    ]
    text = story_of(write_run(tmp_path, log))
    assert "Worker 2 crashed at 1 s and came back at 2 s." in text
    assert "Worker 0 crashed at 3 s and did not come back." in text
    assert "4 messages were lost (3 crashed and 1 dropped)." in text


def test_many_crashes_are_counted(tmp_path: Path) -> None:
    crashes = [
        {"type": kind, "time": float(time + later), "rank": 1}
        for time in range(1, 8)
        for kind, later in (("crashed", 0.0), ("recovered", time / 10))
    ]
    text = story_of(write_run(tmp_path, [header("gossip"), *crashes, ended(9.0)]))
    assert "Workers crashed 7 times, and came back 7 times, after 0.4 s in the median." in text
    assert "Worker 1 crashed" not in text


def test_a_late_worker_joined_and_did_not_crash(tmp_path: Path) -> None:
    log = [
        header("gossip"),
        {"type": "crashed", "time": 0.0, "rank": 2},
        {"type": "recovered", "time": 2.0, "rank": 2},
        {"type": "crashed", "time": 3.0, "rank": 2},
        ended(4.0),
    ]
    text = story_of(write_run(tmp_path, log))
    assert "Worker 2 joined at 2 s. Worker 2 crashed at 3 s and did not come back." in text


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ([ended(2.0, "interrupted")], "gossip was interrupted after 2 s"),
        ([ended(2.0, "failed", "loss is nan")], "gossip failed after 2 s of .* loss is nan"),
        ([ended(2.0, "all crashed")], "All workers of gossip had crashed after 2 s of virtual"),
        ([], "gossip has no end in its log"),
    ],
    ids=["interrupted", "failed", "all crashed", "killed"],
)
def test_run_that_did_not_end_by_itself_is_noticed(
    tmp_path: Path, end: list[Event], words: str
) -> None:
    log = [header("gossip"), {"type": "finished", "time": 2.0, "rank": 0}, *end]
    (notice,) = notices(read_folder(write_run(tmp_path, log)))
    assert re.search(words, notice.replace("\xa0", " "))


@pytest.mark.parametrize("reason", ["finished", "time limit"])
def test_run_that_ended_by_itself_needs_no_notice(tmp_path: Path, reason: str) -> None:
    folder = write_run(tmp_path, [header("gossip"), ended(2.0, reason)])
    assert notices(read_folder(folder)) == []


def test_resumed_run_ended_where_its_last_line_says(tmp_path: Path) -> None:
    later = {"type": "finished", "time": 3.0, "rank": 0}
    log = [header("gossip"), ended(2.0, "interrupted"), later, ended(4.0)]
    assert notices(read_folder(write_run(tmp_path, log))) == []
    killed_later = write_run(tmp_path, log[:-1])
    assert "has no end in its log" in notices(read_folder(killed_later))[0]
