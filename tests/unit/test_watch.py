"""`edgegossip watch`: the stream of a run's logs, and the page in a real browser."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser import CHROMIUM, Browser
from tests.run_folders import Event, evaluations, header, rounds
from tests.tiers import thorough

from edgegossip.cli.main import main
from edgegossip.contract.errors import NetworkError
from edgegossip.report.watching import Stream, WatchServer, run_names


def write(log: Path, *events: Event) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def crash(rank: int, time: float) -> Event:
    return {"type": "crashed", "time": time, "rank": rank}


def told(stream: Stream) -> list[tuple[str, list[str]]]:
    """Names and data of the events that are new."""
    found = []
    for event in b"".join(stream.news()).decode().split("\n\n")[:-1]:
        name, *data = event.split("\n")
        found.append((name.removeprefix("event: "), [d.removeprefix("data: ") for d in data]))
    return found


def test_a_stream_begins_with_all_lines_and_continues_with_new_ones(tmp_path: Path) -> None:
    log, stream = tmp_path / "events.jsonl", Stream(tmp_path)
    assert told(stream) == [("reset", ['{"run": null, "runs": []}']), ("live", [""])]
    write(log, header("one"), crash(0, 1.0))
    names, lines = zip(*told(stream), strict=True)
    assert names == ("reset", "lines", "live")
    assert [json.loads(line)["type"] for line in lines[1]] == ["experiment", "crashed"]
    assert told(stream) == []
    with log.open("a") as file:
        file.write('{"type": "finis')
    assert told(stream) == []  # the line is not complete
    with log.open("a") as file:
        file.write('hed"}\n')
    assert told(stream) == [("lines", ['{"type": "finished"}'])]


def test_a_stream_follows_workers_until_their_run_has_a_log(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    write(tmp_path / "workers" / "0" / "events.jsonl", crash(0, 1.0))
    assert [name for name, _ in told(stream)] == ["reset", "lines", "live"]
    write(tmp_path / "workers" / "1" / "events.jsonl", crash(1, 2.0))  # another one comes
    assert [name for name, _ in told(stream)] == ["lines", "live"]
    write(tmp_path / "events.jsonl", header("all"))
    assert [name for name, _ in told(stream)] == ["reset", "lines", "live"]


def test_a_log_that_begins_again_is_read_again(tmp_path: Path) -> None:
    log, stream = tmp_path / "events.jsonl", Stream(tmp_path)
    write(log, crash(0, 1.0), crash(1, 1.0))
    told(stream)
    log.write_text("")
    write(log, crash(2, 1.0))
    assert told(stream) == []  # it notices
    names, lines = zip(*told(stream), strict=True)
    assert names == ("reset", "lines", "live")
    assert lines[1] == [json.dumps(crash(2, 1.0))]


def test_the_newest_run_of_a_comparison_is_shown_or_the_chosen_one(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "old")):
        log = tmp_path / name / "events.jsonl"
        write(log, header(name))
        os.utime(log, (1000 - age, 1000 - age))
    assert run_names(tmp_path) == ["new", "old"]
    assert json.loads(told(Stream(tmp_path))[1][1][0])["name"] == "new"
    assert json.loads(told(Stream(tmp_path, "old"))[1][1][0])["name"] == "old"
    (tmp_path.parent / "events.jsonl").touch()
    assert json.loads(told(Stream(tmp_path, ".."))[1][1][0])["name"] == "new"


def test_only_this_machine_is_answered(tmp_path: Path) -> None:
    with WatchServer(tmp_path) as server:
        with urllib.request.urlopen(server.url, timeout=20) as page:
            assert "script-src 'nonce-" in page.headers["Content-Security-Policy"]
            assert "http" not in page.read().decode().replace("http://www.w3.org/2000/svg", "")
        foreign = urllib.request.Request(server.url, headers={"Host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(foreign, timeout=20)
        port = int(server.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(NetworkError, match="choose another PORT"):
            WatchServer(tmp_path, port=port)


def test_a_wrong_folder_or_address_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "give the folder of a run" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["watch", str(tmp_path), "--at", "here"])
    assert "the page's address must be PORT or HOST:PORT" in capsys.readouterr().err


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


STATE = "document.querySelectorAll('#t-workers tr')[3]?.cells[1].textContent"


@thorough
def test_the_page_shows_a_loss_goes_back_and_survives_a_restart(
    tmp_path: Path, browser: Browser
) -> None:
    folder, log = tmp_path / "run", tmp_path / "run" / "events.jsonl"
    events = rounds(20, has_barrier=False)
    write(
        log,
        header("<b>gossip</b>"),
        *sorted(events + evaluations(events), key=lambda e: e["time"]),
    )
    end = max(event["time"] for event in events)
    with WatchServer(folder) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        browser.call("Page.navigate", url=server.url)
        browser.until("document.body?.dataset.live === 'yes'")
        browser.until("document.querySelector('#title').textContent.includes('<b>gossip</b>')")
        assert browser.value("document.querySelectorAll('#metric .curve').length") == 2
        write(log, {"type": "recovered", "time": end, "rank": 3}, crash(3, end + 1))
        browser.until(f"{STATE} === 'lost'")
        assert "Worker 3 is lost." in browser.value(
            "document.querySelector('#alarms').innerText"
        )
        set_slider = "slider.value = 10; slider.dispatchEvent(new Event('input'))"
        browser.value(f"const slider = document.querySelector('#slider'); {set_slider}")
        browser.until(f"{STATE} !== 'lost'")
        browser.value("document.querySelector('#live').click()")
        browser.until(f"{STATE} === 'lost'")
        samples = browser.value("total(run.workers.get(0).samples, 1e9)")
        assert samples == 20 * 250
        for width in (400, 1400):
            browser.screenshot(tmp_path / "shot.png", width, dark=width == 400)
            wide = browser.value("document.documentElement.scrollWidth")
            assert wide <= width
    assert browser.complaints == []
    browser.until("!document.querySelector('#broken').hidden")
    with WatchServer(folder, port=port):
        write(log, {"type": "recovered", "time": end + 2, "rank": 3})
        browser.until("document.querySelector('#broken').hidden")
        browser.until(f"isLive && {STATE} !== 'lost'")
        assert browser.value("total(run.workers.get(0).samples, 1e9)") == samples


@thorough
def test_a_killed_worker_is_shown_as_silent(tmp_path: Path, browser: Browser) -> None:
    folder = tmp_path / "run"
    trained = {"type": "trained", "num_steps": 1, "num_samples": 16, "loss": 0.5}
    for rank in range(4):
        log = folder / "workers" / str(rank) / "events.jsonl"
        write(log, {**header("real"), "type": "worker"})
        write(log, {**trained, "rank": rank, "start": 0.5, "time": 1.0})
    with WatchServer(folder) as server:
        browser.call("Page.navigate", url=server.url)
        browser.until(f"document.body?.dataset.live === 'yes' && {STATE} === 'training'")
        at = 4.0
        while browser.value(STATE) != "silent":
            assert at < 300
            at += 0.5
            for rank in range(3):
                log = folder / "workers" / str(rank) / "events.jsonl"
                write(log, {**trained, "rank": rank, "start": at - 0.5, "time": at})
            time.sleep(0.1)
        alarms = browser.value("document.querySelector('#alarms').innerText")
        assert "Worker 3 has been silent" in alarms
    assert browser.complaints == []
