"""`edgegossip watch`: the stream of a run's logs, and the page in a real browser."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest
from tests.browser import Browser
from tests.crew import Forked
from tests.run_folders import Event, evaluations, header, rounds
from tests.tiers import thorough

from edgegossip.cli import worker_command
from edgegossip.cli.main import main
from edgegossip.cli.watch_command import WatchOptions, watching
from edgegossip.contract.errors import NetworkError
from edgegossip.net.identity.certificates import OBSERVER, issue, make_authority
from edgegossip.real.launch import MakeCommand, free_ports
from edgegossip.report.watching import Stream, WatchServer, run_names
from edgegossip.runs.experiment import Experiment


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


def test_a_stream_tells_what_a_launcher_has_measured_once(tmp_path: Path) -> None:
    stream, kept = Stream(tmp_path), tmp_path / "workers" / "evaluations.json"
    write(tmp_path / "workers" / "0" / "events.jsonl", crash(0, 1.0))
    measured = {"0": {"time": 0.0, "accuracy": 0.1}}
    kept.write_text(json.dumps(measured))
    (line,) = told(stream)[-2][1]  # before "live"
    assert json.loads(line) == {"type": "evaluated", "time": 0.0, "accuracy": 0.1}
    assert told(stream) == []
    kept.write_text("{")  # never so, as it is written at once, but no reason to end
    assert told(stream) == []
    kept.write_text(json.dumps(measured | {"5": {"time": 2.0, "accuracy": 0.5}}))
    (line,) = told(stream)[-1][1]
    assert json.loads(line)["time"] == 2.0
    write(tmp_path / "events.jsonl", header("all"))  # with the measurements
    assert [line for name, lines in told(stream) if name == "lines" for line in lines] == [
        json.dumps(header("all"))
    ]


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


def test_launch_serves_the_page_beside_the_run_and_the_workers_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    urls: list[str] = []

    def launched(
        experiment: Experiment, worker: MakeCommand, *, out: Path, **_: object
    ) -> None:
        urls.append(capsys.readouterr().out.split()[-1])
        write(out / "events.jsonl", header("one"))
        with urllib.request.urlopen(f"{urls[0]}events", timeout=20) as stream:
            lines = (line.decode() for line in stream)
            assert any('"name": "one"' in line for line in lines)
        assert "--watch" not in worker(0, "tcp/127.0.0.1:1", [], out, [])
        raise NetworkError("enough")

    monkeypatch.setattr(worker_command, "launch", launched)
    assert main(["launch", "quickstart", "--out", str(tmp_path / "run"), "--watch"]) == 1
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(urls[0], timeout=20)


ROW_2, STATE = (
    f"document.querySelectorAll('#t-workers tr')[{i}]?.cells[1].textContent" for i in (2, 3)
)


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


STATES = "[...document.querySelectorAll('#t-workers tr')].map(r => r.cells[1].innerText)"


def link(what: str, rank: int, peer: int, time: float, reason: str = "a reason") -> Event:
    return {"type": what, "time": time, "rank": rank, "peer": peer, "reason": reason}


@thorough
def test_a_worker_whose_log_goes_on_is_cut_off_and_one_without_is_lost(
    tmp_path: Path, browser: Browser
) -> None:
    folder = tmp_path / "run"
    logs = [folder / "workers" / str(rank) / "events.jsonl" for rank in range(4)]
    trained = {"type": "trained", "num_steps": 1, "num_samples": 16, "loss": 0.5}
    for rank, log in enumerate(logs):
        write(log, {**header("real"), "type": "worker", "rank": rank})
        write(log, {**trained, "rank": rank, "start": 0.0, "time": 1.0})
    with WatchServer(folder) as server:
        browser.call("Page.navigate", url=server.url)
        browser.until("document.body?.dataset.live === 'yes'")
        write(logs[0], link("disconnected", 0, 3, 1.4), link("disconnected", 0, 2, 1.4))
        write(logs[2], link("disconnected", 2, 0, 1.3))  # both ends of a path that is cut
        # The logs come one after the other.
        browser.until(f"{STATES}.join() === 'cut,training,cut,lost'")
        # A slow log that goes on belongs to a machine that works.
        write(logs[3], {**trained, "rank": 3, "start": 1.0, "time": 2.5})
        browser.until(f"{STATE} === 'cut'")
        write(logs[0], link("connected", 0, 3, 2.6), link("connected", 0, 2, 2.6))
        write(logs[2], link("connected", 2, 0, 2.6))
        browser.until(f"{STATES}.every(each => ['training', 'waiting'].includes(each))")
        write(logs[1], {"type": "ended", "time": 2.7, "rank": 1, "reason": "interrupted"})
        browser.until("document.querySelector('#t-workers').innerText.includes('stopped')")
        assert "not at its end" in browser.value("document.querySelector('#story').innerText")
        write(logs[1], {**header("real"), "type": "worker", "rank": 1})
        browser.until("!document.querySelector('#t-workers').innerText.includes('stopped')")
        for rank, log in enumerate(logs):
            write(log, {"type": "ended", "time": 3.0, "rank": rank, "reason": "finished"})
        browser.until("document.querySelector('#story').innerText.includes('has ended')")
        alarms = browser.value("document.querySelector('#alarms').innerText").splitlines()
        told = [line.partition("Worker")[2] for line in alarms if "lost the link" in line]
        assert sorted(told) == [
            " 0 has lost the link with worker 2: a reason.",
            " 0 has lost the link with worker 3: a reason.",
            " 2 has lost the link with worker 0: a reason.",
        ]
        assert sum("is back: a reason" in line for line in alarms) == 3
    assert browser.complaints == []


NOTICE = re.compile(r"^(\S+ \S+) WARNING link with worker (\d+) is (lost|back)", re.M)


def noticed(out: Path, rank: int, peer: int, what: str) -> float:
    """When a worker's own log said so, in seconds since 1970."""
    text = (out / "workers" / str(rank) / "log.txt").read_text()
    found = [time for time, *rest in NOTICE.findall(text) if rest == [str(peer), what]]
    return datetime.strptime(found[-1], "%Y-%m-%d %H:%M:%S,%f").timestamp()


@thorough
def test_axe_finds_nothing_serious(tmp_path: Path, browser: Browser) -> None:
    events = rounds(20, has_barrier=False)
    lines = sorted(events + evaluations(events), key=lambda event: event["time"])
    write(tmp_path / "run" / "events.jsonl", header("gossip"), *lines, crash(3, 100.0))
    with WatchServer(tmp_path / "run") as server:
        browser.call("Page.navigate", url=server.url)
        browser.until(f"document.body?.dataset.live === 'yes' && {STATE} === 'lost'")
        assert browser.serious_findings(tmp_path) == []


@contextmanager
def real_workers(out: Path, certificates: Path | None = None) -> Iterator[list[Forked]]:
    """Four processes that train, and the endpoint of each in its `log.txt`."""
    workers, scheme = list[Forked](), "tcp" if certificates is None else "tls"
    endpoints = [f"{scheme}/127.0.0.1:{port}" for port in free_ports(4)]
    for rank, endpoint in enumerate(endpoints):
        folder = out / "workers" / str(rank)
        folder.mkdir(parents=True)
        command = ["worker", "quickstart", "--num-workers", "4", "--num-epochs", "20000"]
        command += ["--only", "epoch-gossip", "--rank", str(rank), "--out", str(folder)]
        command += ["--lease", "1.5", "--parent", str(os.getpid()), "--listen", endpoint]
        command += [] if certificates is None else ["--tls", str(certificates)]
        others = [each for each in endpoints if each != endpoint]
        workers.append(Forked([*command, "--connect", *others], folder / "log.txt"))
        workers[-1].start()
    (out / "endpoint").write_text(endpoints[0])
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


ALL_TRAIN = "[0, 1, 2, 3].every(rank => run.workers.get(rank)?.longest)"


@pytest.mark.slow
def test_a_kill_and_a_pause_of_real_workers_are_shown_within_a_second_of_their_notice(
    tmp_path: Path, browser: Browser
) -> None:
    out, delays = tmp_path / "out", {}
    with real_workers(out) as workers, WatchServer(out) as server:
        browser.call("Page.navigate", url=server.url)
        browser.until(f"document.body?.dataset.live === 'yes' && {ALL_TRAIN}", 240.0)
        workers[3].kill()
        browser.until(f"{STATE} === 'lost'")
        delays["kill"] = time.time() - noticed(out, 0, 3, "lost")
        os.kill(workers[2].pid, signal.SIGSTOP)
        browser.until(f"{ROW_2} === 'lost'")
        delays["pause"] = time.time() - noticed(out, 0, 2, "lost")
        os.kill(workers[2].pid, signal.SIGCONT)
        browser.until(f"!['lost', 'cut'].includes({ROW_2})")
        delays["return"] = time.time() - noticed(out, 0, 2, "back")
    print("seconds from the notice to the page:", delays)
    assert max(delays.values()) < 1.0
    assert browser.complaints == []


@pytest.mark.slow
def test_a_mesh_is_watched_over_one_worker_and_again_after_a_restart(
    tmp_path: Path, browser: Browser
) -> None:
    out, certificates = tmp_path / "out", tmp_path / "certs"
    make_authority(certificates)
    issue(certificates, [*range(4), OBSERVER])
    samples = "total(run.workers.get(1).samples, 1e9)"
    with real_workers(out, certificates) as workers:
        endpoint = (out / "endpoint").read_text()
        options = WatchOptions(connect=(endpoint,), tls=certificates)
        with watching(options, "127.0.0.1", 0) as server:
            port = int(server.url.rstrip("/").rpartition(":")[2])
            browser.call("Page.navigate", url=server.url)
            browser.until(f"document.body?.dataset.live === 'yes' && {ALL_TRAIN}", 240.0)
            workers[3].kill()
            browser.until(f"{STATE} === 'lost'")
            delay = time.time() - noticed(out, 0, 3, "lost")
            before = browser.value(samples)
        browser.until("!document.querySelector('#broken').hidden")
        with watching(options, "127.0.0.1", port):
            browser.until("document.querySelector('#broken').hidden")
            # The killed worker does not answer any more; the others know all that they knew.
            browser.until(f"isLive && run.workers.get(1)?.longest && {samples} >= {before}")
            browser.until(f"{STATE} === 'lost'")
    print("seconds from the notice to the page, over the network:", delay)
    assert delay < 1.5


@thorough
def test_the_axis_of_a_single_measurement_begins_at_zero(
    tmp_path: Path, browser: Browser
) -> None:
    [first, *_] = evaluations(rounds(4, has_barrier=False))
    write(tmp_path / "events.jsonl", header("gossip"), {**first, "accuracy": 0.954})
    with WatchServer(tmp_path) as server:
        browser.call("Page.navigate", url=server.url)
        browser.until("document.body?.dataset.live === 'yes'")
        labels = "[...document.querySelectorAll('#metric text')].map(t => t.textContent)"
        browser.until(f"{labels}.includes('95.4 %')")
        percents = [each for each in browser.value(labels) if each.endswith("%")]
        assert percents == ["0.0 %", "23.8 %", "47.7 %", "71.5 %", "95.4 %"]


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


@thorough
def test_a_page_that_was_left_is_told_nothing_until_it_is_back(
    tmp_path: Path, browser: Browser
) -> None:
    trained = {"type": "trained", "rank": 0, "num_steps": 1, "num_samples": 16, "loss": 0.5}
    log = tmp_path / "events.jsonl"
    write(log, header("gossip"))
    with WatchServer(tmp_path) as server:
        browser.call("Page.navigate", url=server.url)
        browser.until("document.body?.dataset.live === 'yes'")
        browser.call("Page.navigate", url="about:blank")
        deadline, at = time.monotonic() + 8, 0.0
        while server.is_watched:  # until a line cannot be told
            assert time.monotonic() < deadline
            at += 1.0
            write(log, {**trained, "start": at - 1.0, "time": at})
            time.sleep(0.1)
        entries = browser.call("Page.getNavigationHistory")["entries"]
        browser.call("Page.navigateToHistoryEntry", entryId=entries[-2]["id"])
        while not server.is_watched:  # the browser answers no question on its way
            assert time.monotonic() < deadline
            time.sleep(0.1)
        browser.until("document.body?.dataset.live === 'yes'")
        browser.until(f"total(run.workers.get(0).samples, 1e9) === {16 * at:.0f}")
