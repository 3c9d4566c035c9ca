"""Stores of telemetry: what was put in comes out, and a store that fails disturbs nobody."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.small_runs import small_disk
from tests.tiers import thorough

from edgegossip.contract.errors import NetworkError
from edgegossip.machine.telemetry import (
    Journal,
    JsonLinesTelemetry,
    MemoryTelemetry,
    RedisTelemetry,
    Sample,
    TelemetryStore,
    open_telemetry,
)
from edgegossip.real.launch import free_ports


def sample(minute: int) -> Sample:
    return Sample(60.0 * minute, 60.0, cores=0.25, network=1e3, disk=0.5, throughput=99.5)


@pytest.fixture(params=["memory", "lines", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TelemetryStore]:
    kind = request.param
    where = {"memory": "memory", "lines": str(tmp_path / "telemetry.jsonl")}
    if kind == "redis":
        where["redis"] = request.getfixturevalue("redis_url")
    store = open_telemetry(where[kind], run="a run")
    yield store
    store.close()


@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed; apt-get install redis-server")
    [port] = free_ports(1)
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen([*command, "--dir", str(folder)], stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield f"redis://127.0.0.1:{port}/0", server
    finally:
        server.kill()
        server.wait()


def _wait_for(port: int) -> None:
    for _ in range(500):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return
    pytest.fail("redis-server did not start within 5 s")


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as (url, _):
        yield url


# Every store.


def test_what_was_stored_comes_back_in_order_and_by_rank(store: TelemetryStore) -> None:
    for minute in range(3):
        store.append(0, sample(minute))
    store.append(1, sample(7))
    assert store.read(0) == [sample(0), sample(1), sample(2)]
    assert store.read(1) == [sample(7)]
    assert store.read(2) == []


# Lines.


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    writers = [JsonLinesTelemetry(path) for _ in range(3)]
    for minute in range(50):
        for rank, writer in enumerate(writers):
            writer.append(rank, sample(minute))
    for rank in range(3):
        assert JsonLinesTelemetry(path).read(rank) == [sample(minute) for minute in range(50)]


def test_a_line_cut_by_a_power_cut_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    JsonLinesTelemetry(path).append(0, sample(0))
    with path.open("ab") as file:
        file.write(b'{"rank": 0, "at": 12')
    store = JsonLinesTelemetry(path)
    store.append(0, sample(2))
    assert store.read(0) == [sample(0), sample(2)]


def test_on_a_full_disk_samples_wait_until_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = JsonLinesTelemetry(tmp_path / "telemetry.jsonl")
    journal = Journal(store, rank=0)
    with caplog.at_level(logging.INFO, "edgegossip.machine"):
        with small_disk(max_bytes=200):
            for minute in range(5):
                journal.append(sample(minute))
        assert len(caplog.records) == 1
        journal.append(sample(5))
    assert store.read(0) == [sample(minute) for minute in range(6)]
    assert caplog.records[-1].message == "telemetry is stored again"


def test_a_file_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.jsonl"
    store = JsonLinesTelemetry(path)
    store.append(0, sample(0))
    os.replace(path, tmp_path / "telemetry.jsonl.1")
    store.append(0, sample(1))
    assert store.read(0) == [sample(1)]


# Memory and Redis keep a week.


def test_the_oldest_samples_make_room(redis_url: str) -> None:
    stores: list[Callable[[int], TelemetryStore]] = [
        lambda most: MemoryTelemetry(most),
        lambda most: RedisTelemetry(redis_url, "full", most),
    ]
    for make in stores:
        store = make(3)
        for minute in range(5):
            store.append(0, sample(minute))
        assert store.read(0) == [sample(2), sample(3), sample(4)]
        store.close()


# Redis.


def test_storing_a_sample_again_changes_nothing_in_redis(redis_url: str) -> None:
    store = RedisTelemetry(redis_url, "again")
    store.append(0, sample(0))
    store.append(0, sample(0))
    assert store.read(0) == [sample(0)]
    store.close()


def test_runs_that_share_a_redis_are_told_apart(redis_url: str) -> None:
    mine, yours = (RedisTelemetry(redis_url, run) for run in ("mine", "yours"))
    mine.append(0, sample(0))
    assert yours.read(0) == []
    mine.close()
    yours.close()


@thorough
def test_a_redis_that_dies_mid_run_disturbs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("redis")
    with redis_server(tmp_path) as (url, server):
        store = RedisTelemetry(url, "run")
        journal = Journal(store, rank=0)
        journal.append(sample(0))
        server.kill()
        server.wait()
        start = time.monotonic()
        with caplog.at_level(logging.WARNING, "edgegossip.machine"):
            for minute in range(2000):
                journal.append(sample(minute))
        assert time.monotonic() - start < 5
        [record] = caplog.records
        unstored = (
            "telemetry is not stored, but training continues: Redis at redis://127.0.0.1:"
        )
        assert unstored in record.message
        assert len(journal._unstored) == 24 * 60
        with pytest.raises(NetworkError, match=r"Redis at redis://127\.0\.0\.1"):
            store.read(0)
        store.close()


@pytest.mark.slow
def test_a_redis_that_says_nothing_is_given_up_on_after_a_second() -> None:
    pytest.importorskip("redis")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        store = RedisTelemetry(f"redis://127.0.0.1:{deaf.getsockname()[1]}/0", "run")
        start = time.monotonic()
        with pytest.raises(NetworkError, match=r"Redis at .* failed"):
            store.append(0, sample(0))
        assert 0.5 < time.monotonic() - start < 5
        store.close()


def test_passwords_stay_out_of_messages() -> None:
    pytest.importorskip("redis")
    [port] = free_ports(1)
    store = RedisTelemetry(f"redis://me:secret@127.0.0.1:{port}/0", "run")
    with pytest.raises(NetworkError) as raised:
        store.append(0, sample(0))
    assert "secret" not in str(raised.value)
    store.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://box:6379/0", (None, "from the environment")),
        ("redis://me@box:6379/0", ("me", "from the environment")),
        ("redis://me:typed@box:6379/0", ("me", "typed")),
    ],
)
def test_a_password_may_come_from_the_environment_where_nobody_sees_it(
    url: str, expected: tuple[str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis")
    monkeypatch.setenv("EDGEGOSSIP_REDIS_PASSWORD", "from the environment")
    store = RedisTelemetry(url, "run")
    given = store._redis.connection_pool.connection_kwargs
    assert (given.get("username"), given["password"]) == expected
    store.close()


def test_addresses_and_missing_packages_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NetworkError, match="must look like redis://host:6379/0") as raised:
        open_telemetry("redis://me:secret@host:port/0", "run")
    assert "secret" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(NetworkError, match=r"pip install 'edgegossip\[redis\]'"):
        open_telemetry("redis://localhost:6379/0", "run")
