"""Log lines as JSON: their fields, and those of real workers."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiers import thorough

from edgegossip.cli.printing import LogOptions, complain, log_to_console, warn
from edgegossip.real.launch import LOG, free_ports, last_line

JSON = LogOptions(log_format="json")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The root logger, as it is when a process begins."""
    root = logging.getLogger()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    handlers, level = root.handlers, root.level
    yield root
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_has_its_fields_and_those_of_the_process(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    root.handlers = []
    log_to_console(logging.INFO, options=JSON, run="mine", rank=2)
    logging.getLogger("edgegossip.net").info("link %d\n\x1b[2J", 3, extra={"round": 7})
    [line] = objects(capsys.readouterr().err)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "INFO",
        "logger": "edgegossip.net",
        "run": "mine",
        "rank": 2,
        "message": "link 3\n\x1b[2J",
        "round": 7,
    }


def test_errors_warnings_and_tracebacks_are_objects_too(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    root.handlers = []
    log_to_console(options=JSON)
    warn("the models differ")
    complain("no such folder")
    try:
        raise KeyError("gone")
    except KeyError:
        sys.excepthook(*sys.exc_info())
    warned, ended, crashed = objects(capsys.readouterr().err)
    assert (warned["level"], warned["message"]) == ("WARNING", "the models differ")
    assert (ended["level"], ended["message"]) == ("ERROR", "no such folder")
    assert crashed["level"] == "CRITICAL"
    assert "raise KeyError" in crashed["exception"]


def test_text_is_as_it_was(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    root.handlers = []
    log_to_console()
    warn("the models differ")
    logging.getLogger("edgegossip.net").warning("a\nb")
    complain("no such folder")
    assert capsys.readouterr().err == (
        "warning: the models differ\na\\nb\nedgegossip: no such folder\n"
    )


def test_a_launcher_reads_the_reason_from_a_json_line(tmp_path: Path) -> None:
    for logger, text in (("edgegossip.cli", "edgegossip: full"), ("edgegossip.net", "full")):
        line = json.dumps({"logger": logger, "message": "full"})
        (tmp_path / LOG).write_text(f"first\n{line}\n")
        assert last_line(tmp_path).startswith(f"{text} (see ")


@thorough
def test_all_that_workers_write_to_standard_error_is_json(tmp_path: Path) -> None:
    ports = free_ports(2)
    workers = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "edgegossip", "worker", "quickstart"),
                *("--num-workers", "2", "--num-epochs", "1", "--rank", str(rank)),
                *("--listen", f"tcp/127.0.0.1:{ports[rank]}"),
                *("--connect", f"tcp/127.0.0.1:{ports[1 - rank]}"),
                *("--out", str(tmp_path / str(rank)), "--log-format", "json"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, worker in enumerate(workers):
        said, logged = worker.communicate(timeout=120)
        assert worker.returncode == 0, logged
        assert "finished" in said
        lines = objects(logged)
        assert lines
        assert {(line["run"], line["rank"]) for line in lines} == {("quickstart", rank)}
        assert {"INFO"} <= {line["level"] for line in lines}


@thorough
def test_a_worker_that_meets_nobody_says_so_in_json(tmp_path: Path) -> None:
    command = ["worker", "quickstart", "--rank", "0", "--meet-seconds", "0.5"]
    network = ["--connect", "tcp/127.0.0.1:9", "--listen", "tcp/127.0.0.1:0"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "edgegossip", *command, *network),
            *("--out", str(tmp_path), "--log-format", "json"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    last = objects(done.stderr)[-1]
    assert (last["logger"], last["level"]) == ("edgegossip.cli", "ERROR")
    assert "met" in last["message"] or "0.5" in last["message"]
