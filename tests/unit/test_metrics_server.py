"""`--metrics`: what a scrape shows, and when a worker is healthy and ready."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.complaints import complaint
from tests.hosts import EPOCHS, make_host
from tests.small_runs import NUM_WORKERS
from tests.tiers import thorough
from tests.unit.test_worker import ENDLESS, SHORT
from tests.worker_threads import WITHIN, Crew

from edgegossip.cli import router_command, worker_command
from edgegossip.cli.main import main
from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.contract.protocol import Predicted
from edgegossip.net.host.host import Host
from edgegossip.net.host.timing import Patience
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real import host_metrics, worker as worker_module
from edgegossip.real.host_metrics import HostMetrics
from edgegossip.real.metrics_server import (
    MetricsAddress,
    MetricsServer,
    RouterMetrics,
    metrics_address,
)

ROOT = Path(__file__).parents[2]
LOCAL = MetricsAddress("127.0.0.1", 0)
Samples = dict[tuple[str, tuple[str, ...]], float]


def get(port: int, path: str) -> tuple[int, str]:
    """The status and the text of a page."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(port: int) -> Samples:
    """Values by name and labels, as Prometheus reads them."""
    status, text = get(port, "/metrics")
    assert status == 200
    families = text_string_to_metric_families(text)
    each = [sample for family in families for sample in family.samples]
    found = {(one.name, tuple(one.labels.values())): one.value for one in each}
    assert len(found) == len(each)
    return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[MetricsServer]:
    """The servers of all workers, in the order of their start."""
    made: list[MetricsServer] = []
    plain = MetricsServer.__init__

    def remembered(self: MetricsServer, address: MetricsAddress) -> None:
        plain(self, address)
        made.append(self)

    monkeypatch.setattr(MetricsServer, "__init__", remembered)
    return made


@contextmanager
def serving(shown: Any = None) -> Iterator[int]:  # noqa: ANN401
    with ExitStack() as opened:
        server = opened.enter_context(closing(MetricsServer(LOCAL)))
        if shown is not None:
            opened.enter_context(server.showing(shown))
        yield server.port


# A worker.


@thorough
def test_a_worker_is_ready_once_it_has_met_its_peers_and_counts_from_then_on(
    tmp_path: Path, servers: list[MetricsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[Host[Any]] = []

    def shown(host: Host[Any]) -> HostMetrics:
        hosts.append(host)
        return HostMetrics(host)

    monkeypatch.setattr(worker_module, "HostMetrics", shown)
    crew, settings = Crew(tmp_path), replace(WITHIN, meet_seconds=60.0, metrics="0")
    crew.start(ENDLESS, 0, settings=settings)
    until(lambda: bool(hosts))
    [server] = servers
    port = server.port
    assert [get(port, path)[0] for path in ("/healthz", "/readyz")] == [200, 503]
    assert scrape(port)["edgegossip_peers_in_reach", ()] == 0
    crew.start(ENDLESS, *range(1, NUM_WORKERS), settings=settings)
    until(lambda: get(port, "/readyz")[0] == 200)
    until(lambda: scrape(port)["edgegossip_samples_total", ()] > 0)
    first = scrape(port)
    until(lambda: scrape(port)["edgegossip_round", ()] > first["edgegossip_round", ()] + 3)
    second = scrape(port)
    growing = ("samples", "training_seconds", "waiting_seconds")
    for name in growing:
        key: tuple[str, tuple[str, ...]] = (f"edgegossip_{name}_total", ())
        assert 0 <= first[key] <= second[key], name
    for rank in range(1, NUM_WORKERS):
        for way in ("sent", "received"):
            key = (f"edgegossip_{way}_bytes_total", (str(rank),))
            assert 0 < first[key] < second[key], (rank, way)
        assert second["edgegossip_peer_in_reach", (str(rank),)] == 1
    assert second["edgegossip_peers_in_reach", ()] == NUM_WORKERS - 1
    assert second["edgegossip_training_seconds_total", ()] > 0
    assert second["edgegossip_measured_samples_per_second", ()] > 0
    assert second["process_resident_memory_bytes", ()] > 1e6
    assert second["edgegossip_ready", ()] == 1
    answered = threading.Event()
    hosts[0].ping(answered.set)
    assert answered.wait(60)
    assert get(port, "/healthz") == (200, "healthy\n")
    for host in hosts:
        host.stop()
    assert crew.join(*range(NUM_WORKERS)) == ["interrupted"] * NUM_WORKERS
    with pytest.raises(urllib.error.URLError):
        get(port, "/readyz")


@thorough
def test_nothing_listens_without_the_option(
    tmp_path: Path, servers: list[MetricsServer]
) -> None:
    assert Crew(tmp_path).all(SHORT) == ["finished"] * NUM_WORKERS
    assert servers == []
    assert not [each for each in threading.enumerate() if each.name == "metrics"]


def test_a_used_port_is_named_before_a_folder_is_made(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        crew.start(SHORT, 0, settings=replace(WITHIN, metrics=str(port)))
        [error] = crew.join(0)
    assert isinstance(error, NetworkError)
    assert f"cannot serve metrics at 127.0.0.1:{port}" in str(error)
    assert "choose another --metrics" in str(error)
    assert not crew.folder(0).exists()


class Stand:
    """As much of a host as health looks at."""

    def __init__(self, *, has_begun: bool = True) -> None:
        self.peers = SimpleNamespace(has_begun=has_begun)
        self.answers: list[Callable[[], None]] = []
        self.ping = self.answers.append


def test_a_worker_is_unhealthy_once_its_thread_has_not_answered_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    host: Any = Stand()
    shown = HostMetrics(host)
    assert shown.is_healthy
    now += host_metrics.PATIENCE - 1
    assert shown.is_healthy
    now += 2
    assert not shown.is_healthy
    assert len(host.answers) == 1  # a hanging worker's queue does not grow
    host.answers[0]()
    assert shown.is_healthy
    assert len(host.answers) == 2


def test_a_worker_that_still_connects_is_not_asked() -> None:
    host: Any = Stand(has_begun=False)
    assert HostMetrics(host).is_healthy
    assert host.answers == []


def test_a_server_with_a_hanging_process_says_503() -> None:
    with serving(SimpleNamespace(is_healthy=False, is_ready=True)) as port:
        assert get(port, "/healthz") == (503, "not healthy\n")
        assert get(port, "/readyz") == (200, "ready\n")


def test_a_wait_counts_while_it_lasts_and_when_rounds_divide_it() -> None:
    patience = Patience()
    patience.watch(True, now=1.0)
    assert patience.total_waited(3.0) == 2.0
    patience.next_round(now=4.0)
    patience.watch(False, now=6.0)
    assert patience.total_waited(9.0) == 5.0


# What the page and the dashboard name.


def all_names() -> set[str]:
    """The names of all metrics that a worker, a router and the server have."""
    host = make_host(EPOCHS, 0, MemoryNetwork())
    host.trainings.add(num_samples=8, seconds=2.0)
    host._work.forecast = Predicted(4.0, 0.1)
    router: Any = SimpleNamespace(num_present=0)
    with closing(MetricsServer(LOCAL)) as server:
        families = [*server.collect(), *HostMetrics(host).collect()]
        families += RouterMetrics(router).collect()
    return {each.name + "_total" * (each.type == "counter") for each in families}


def test_the_page_lists_every_metric_and_no_other() -> None:
    [table] = re.findall(
        r"\| Metric \| Meaning \|\n(.*?)\n\n", (ROOT / "docs/monitor.md").read_text(), re.DOTALL
    )
    listed = set(re.findall(r"`((?:edgegossip|process)_\w+)", table))
    assert listed == all_names()


def test_the_dashboard_shows_only_metrics_that_there_are() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({each["id"] for each in panels}) == len(panels) > 10
    expressions = [target["expr"] for each in panels for target in each["targets"]]
    queries = [each["query"] for each in dashboard["templating"]["list"]]
    named = set(re.findall(r"(?:edgegossip|process)_\w+", f"{expressions} {queries}"))
    assert named <= all_names()
    assert all(text.count("(") == text.count(")") for text in expressions)


# Routers, and the server itself.


def test_a_router_shows_its_workers_and_is_ready_at_once() -> None:
    router: Any = SimpleNamespace(num_present=3)
    with serving(RouterMetrics(router)) as port:
        assert scrape(port)["edgegossip_router_workers", ()] == 3
        assert [get(port, path)[0] for path in ("/healthz", "/readyz")] == [200, 200]


@thorough
def test_the_command_router_serves_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, servers: list[MetricsServer]
) -> None:
    found: list[tuple[int, float]] = []

    class Asked(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            port = servers[0].port
            found.append((get(port, "/readyz")[0], scrape(port)["edgegossip_ready", ()]))
            return True

    monkeypatch.setattr(router_command, "threading", SimpleNamespace(Event=Asked))
    assert main(["router", "--listen", "tcp/127.0.0.1:0", "--metrics", "0"]) == 0
    assert found == [(200, 1.0)]


def test_before_anything_is_shown_a_process_is_healthy_and_not_ready() -> None:
    with serving() as port:
        assert [get(port, path)[0] for path in ("/healthz", "/readyz")] == [200, 503]
        assert scrape(port)["edgegossip_ready", ()] == 0
        assert get(port, "/")[0] == 404


@pytest.mark.parametrize("given", ["", "x", "70000", "-1", ":9464", "host:", "::1:9464", "a b"])
def test_what_is_no_address_is_told_what_is(given: str) -> None:
    with pytest.raises(ValueError, match="must be PORT or HOST:PORT with a port in"):
        metrics_address(given)


@pytest.mark.parametrize(
    "arguments",
    [
        ["worker", "quickstart", "--rank", "0", "--multicast", "--metrics", "70000"],
        ["launch", "quickstart", "--metrics", "70000"],
    ],
    ids=["worker", "launch"],
)
def test_a_bad_port_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "must be PORT or HOST:PORT" in capsys.readouterr().err


def test_a_bad_port_of_a_router_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["router", "--listen", "tcp/127.0.0.1:0", "--metrics", "70000"])
    assert "must be PORT or HOST:PORT" in capsys.readouterr().err


def test_launch_gives_each_worker_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def launched(_: object, worker: Callable[..., list[str]], **__: object) -> None:
        commands.extend(worker(rank, "tcp/a:1", [], tmp_path, []) for rank in range(2))
        raise UsageError("enough")

    monkeypatch.setattr(worker_command, "launch", launched)
    given = ["launch", "quickstart", "-n", "2", "--out", str(tmp_path), "--metrics"]
    assert main([*given, "0.0.0.0:9464"]) == 2
    ports = [each[each.index("--metrics") + 1] for each in commands]
    assert ports == ["0.0.0.0:9464", "0.0.0.0:9465"]
    assert all(each.count("--metrics") == 1 for each in commands)
    capsys.readouterr()
    assert main([*given, "65535"]) == 2
    assert "a port for each of 2 workers: port 65536 is above 65535" in complaint(capsys)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'edgegossip\[metrics\]'"):
        MetricsServer(LOCAL)
