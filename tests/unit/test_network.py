"""`join` and `edgegossip worker` apply their settings."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.complaints import complaint
from tests.small_runs import small_run
from tests.tiers import thorough

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.cli.main import main
from edgegossip.cli.router_command import router_command
from edgegossip.contract.protocol import Rank
from edgegossip.contract.topology import complete
from edgegossip.machine.counters import Counters
from edgegossip.machine.monitor import Monitor
from edgegossip.net.address import Address
from edgegossip.net.identity.certificates import issue, make_authority
from edgegossip.net.memory import MemoryNetwork
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real import join as network
from edgegossip.real.join import Connection, join
from edgegossip.real.worker import WorkerSettings, take_part
from edgegossip.training.learner import Learner

ALONE = Address(listen=("tcp/127.0.0.1:0",))
EXPERIMENT = small_run(algorithm="gosgd", evaluation_interval=None)


class Joined:
    """Call `join`; return the node, and the threads used to measure the machine's speed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[int] = []
        self.transport: Any = None
        self.counters: Counters | None = None
        monkeypatch.setattr(network, "seconds_per_sample", self._measure)
        monkeypatch.setattr(network, "Monitor", self._monitor)
        monkeypatch.setattr(network, "take_part", self._take_part)

    def _measure(self, *_: object, threads: int, executors: object) -> float:
        self.threads.append(threads)
        return 0.01

    def _monitor(self, *arguments: Any, counters: Counters, **named: Any) -> Monitor:  # noqa: ANN401
        self.counters = counters
        return Monitor(*arguments, counters=counters, **named)

    def _take_part(self, _: object, rank: Rank, transport: Any, **named: Any) -> str:  # noqa: ANN401
        self.transport = transport
        self.threads.append(named["settings"].threads)
        return "finished"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Joined:
    return Joined(monkeypatch)


def test_what_we_send_and_receive_is_not_use_by_others(
    joined: Joined, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ZenohTransport, "network_bytes", 1234)
    join(EXPERIMENT, 0, out=tmp_path, connection=Connection(address=ALONE))
    assert joined.counters is not None
    assert joined.counters.read().own.network == 1234


def test_a_worker_has_the_lease_and_the_threads_of_its_options(
    joined: Joined, tmp_path: Path
) -> None:
    options = [
        "--lease",
        "6",
        "--upload-limit",
        "8mbit",
        "--threads",
        "3",
        "--listen",
        "tcp/127.0.0.1:0",
    ]
    out = ["--out", str(tmp_path / "0"), "--parent", str(os.getpid())]
    assert main(["worker", "quickstart", "--rank", "0", *options, *out]) == 0
    assert joined.threads == [3, 3]
    lease = "transport/link/tx/lease"
    assert joined.transport._settings[lease] == 6000
    assert joined.transport._upload.rate == 1e6


@pytest.mark.parametrize(
    ("name", "in_keys"), [("", ""), ("night", "night:"), ("my night", "my_night:")], ids=repr
)
def test_the_name_of_a_run_is_where_certificates_are_compared_with_it(
    joined: Joined, tmp_path: Path, name: str, in_keys: str
) -> None:
    settings = WorkerSettings(name=name)
    join(EXPERIMENT, 0, out=tmp_path, connection=Connection(address=ALONE), settings=settings)
    assert joined.transport._run == in_keys + EXPERIMENT.run_name


def test_a_worker_accepts_no_certificate_that_it_is_told_to_ban(
    joined: Joined, tmp_path: Path
) -> None:
    make_authority(tmp_path / "certs")
    issue(tmp_path / "certs", [0], run_name="night")
    options = ["--tls", str(tmp_path / "certs"), "--ban", "BEEF", "--ban", "c0:de"]
    network = ["--listen", "tls/127.0.0.1:0", "--name", "night"]
    out = ["--out", str(tmp_path / "0"), "--parent", str(os.getpid())]
    assert main(["worker", "quickstart", "--rank", "0", *options, *network, *out]) == 0
    assert joined.transport.credentials().banned == {0xBEEF, 0xC0DE}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ban", "worker-1"], "a serial number has 1 to 40 hexadecimal digits"),
        (["--threads", "0"], "threads must be at least 1, got 0"),
        (["--lease", "0"], "lease must be from 0.1 to 3600 seconds, got 0.0"),
        (["--upload-limit", "fast"], "such as 10mbit, got 'fast'"),
        (["--upload-limit", "0mbit"], "such as 10mbit, got '0mbit'"),
        (["--lease", "nan"], "lease must be from 0.1 to 3600 seconds, got nan"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listen = ["--listen", "tcp/127.0.0.1:0"]
    assert main(["worker", "quickstart", "--rank", "0", *listen, *options]) == 2
    assert message in complaint(capsys)


def test_a_router_has_a_lease_too() -> None:
    with pytest.raises(ValueError, match=r"lease must be from 0\.1 to 3600 seconds, got 0\.05"):
        router_command(["--listen", "tcp/127.0.0.1:0", "--lease", "0.05"])


def watch_threads(monkeypatch: pytest.MonkeyPatch, method: str) -> set[int]:
    """How many threads a step may take, whenever `method` of a learner is called."""
    found: set[int] = set()
    original = getattr(Learner, method)

    def watched(self: Learner, *arguments: Any) -> Any:  # noqa: ANN401
        found.add(torch.get_num_threads())
        return original(self, *arguments)

    monkeypatch.setattr(Learner, method, watched)
    return found


@thorough
@pytest.mark.parametrize("threads", [1, 2])
def test_training_takes_as_many_threads_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    earlier, found = torch.get_num_threads(), watch_threads(monkeypatch, "train")
    settings = WorkerSettings(
        meet_seconds=0.01, min_workers=1, threads=threads, max_seconds=1.0
    )
    take_part(
        EXPERIMENT, 0, MemoryNetwork().transport(0), out=tmp_path / "0", settings=settings
    )
    assert found == {threads}
    assert torch.get_num_threads() == earlier


def test_speed_is_measured_with_the_threads_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = watch_threads(monkeypatch, "train")
    assert network.seconds_per_sample(EXPERIMENT, 0, seconds=0.01, threads=2)
    assert found == {2}


def test_a_spare_knows_its_speed_before_it_has_data() -> None:
    inner = EpochGossip(topology=complete(4), num_rounds=1)
    balanced = EdgeGossip(inner=inner, on_failure="reassign", spares=(3,))
    experiment = replace(EXPERIMENT, algorithm=balanced)
    assert not balanced.role(3).has_data
    assert (network.seconds_per_sample(experiment, 3, seconds=0.01) or 0) > 0
