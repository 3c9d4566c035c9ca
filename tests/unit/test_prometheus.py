"""A real Prometheus scrapes a worker, and understands the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.hosts import EPOCHS, make_host
from tests.tiers import thorough
from tests.unit.test_metrics_server import ROOT, serving, until

from edgegossip.contract.protocol import Predicted
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.host_metrics import HostMetrics
from edgegossip.real.launch import free_ports

PROMETHEUS = shutil.which("prometheus")


def query(port: int, expression: str) -> list[dict[str, Any]]:
    """Answer of Prometheus; empty while it starts."""
    words = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{words}") as page:
            found: list[dict[str, Any]] = json.load(page)["data"]["result"]
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 503:
                return []
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
    except urllib.error.URLError:
        return []
    return found


def expressions() -> list[str]:
    """The queries of the dashboard, as Grafana sends them."""
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text())
    found = [target["expr"] for each in dashboard["panels"] for target in each["targets"]]
    found = [each.replace("$__rate_interval", "10s") for each in found]
    return [re.sub(r"\$\w+", ".*", each) for each in found]  # variables, as "All"


@thorough
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
def test_prometheus_scrapes_a_worker_and_answers_every_query_of_the_dashboard(
    tmp_path: Path,
) -> None:
    assert PROMETHEUS is not None
    host = make_host(EPOCHS, 0, MemoryNetwork())
    host.trainings.add(num_samples=8, seconds=2.0)
    host._work.forecast = Predicted(4.0, 0.1)
    [told] = re.findall(
        r"```yaml\n(scrape_configs:.*?)```", (ROOT / "docs/monitor.md").read_text(), re.DOTALL
    )
    [port] = free_ports(1)
    with serving(HostMetrics(host)) as worker:
        config = re.sub(r"\[.*\]", f"['127.0.0.1:{worker}']", told).replace("10s", "1s")
        (tmp_path / "prometheus.yml").write_text(config)
        options = {
            "config.file": tmp_path / "prometheus.yml",
            "storage.tsdb.path": tmp_path / "data",
            "web.listen-address": f"127.0.0.1:{port}",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        with (tmp_path / "log.txt").open("wb") as log:
            process = subprocess.Popen([PROMETHEUS, *words], stderr=log)
        try:
            until(lambda: bool(query(port, "up == 1")))
            until(lambda: bool(query(port, "rate(edgegossip_samples_total[10s])")))
            [samples] = query(port, "edgegossip_samples_total")
            assert samples["value"][1] == "8"
            assert samples["metric"]["job"] == "edgegossip"
            empty = [each for each in expressions() if not query(port, each)]
        finally:
            process.terminate()
            process.wait()
    # A worker that has met nobody has neither sent nor received nor refused anything.
    by_peer = re.compile("_(sent|received|send_queue)_bytes|_refusals_")
    assert [each for each in empty if not by_peer.search(each)] == []
