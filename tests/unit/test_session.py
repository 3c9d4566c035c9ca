"""Workers that only call others: how they wait, and how long; real sessions on loopback."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.hosts import EPOCHS, Slow
from tests.parity import SETTINGS
from tests.tiers import thorough
from tests.transports import Recorder
from tests.worlds import NUM_PARAMS

from edgegossip.contract.errors import NetworkError
from edgegossip.net.address import Address
from edgegossip.net.host.host import Host
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports


@pytest.fixture
def endpoint() -> str:
    return f"tcp/127.0.0.1:{free_ports(1)[0]}"


@pytest.fixture
def caller(endpoint: str) -> Iterator[ZenohTransport]:
    """Worker 1 of two, which listens nowhere and calls `endpoint`."""
    transport = ZenohTransport(
        run="test", rank=1, num_workers=2, address=Address(connect=(endpoint,))
    )
    yield transport
    transport.close()


@pytest.mark.slow
def test_one_that_calls_where_nobody_is_says_so_and_gives_up(
    caller: ZenohTransport,
    endpoint: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("edgegossip.net.zenoh.session._SOON", 0.05)
    deadline = time.monotonic() + 1.2
    with pytest.raises(
        NetworkError, match=f"cannot reach {endpoint}: no program listens there"
    ):
        caller.open(Recorder(), keep_trying=lambda: time.monotonic() < deadline)
    assert time.monotonic() < deadline + 2
    assert f"still trying to reach {endpoint}" in caplog.text


@pytest.mark.slow
def test_one_that_calls_finds_a_worker_that_comes_later(
    caller: ZenohTransport, endpoint: str
) -> None:
    events = Recorder()
    calling = threading.Thread(target=caller.open, args=(events,), daemon=True)
    calling.start()
    time.sleep(0.7)  # longer than one attempt
    listener = ZenohTransport(
        run="test", rank=0, num_workers=2, address=Address(listen=(endpoint,)), incarnation=7
    )
    listener.open(Recorder())
    assert events.next() == ("appeared", 0, 7)
    calling.join(10)
    listener.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "limit"])
def test_a_host_whose_worker_calls_in_vain_hears_stop_and_its_limit(
    caller: ZenohTransport, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    meet_seconds = 0.3 if how == "limit" else 60.0
    host = Host(
        EPOCHS,
        1,
        2,
        torch.zeros(NUM_PARAMS),
        Slow(1),
        caller,
        settings=replace(SETTINGS, meet_seconds=meet_seconds),
    )
    began_at = time.monotonic()
    if how == "limit":
        with pytest.raises(NetworkError, match="cannot reach tcp/127"):
            host.run()
    else:
        threading.Timer(0.3, host.stop).start()
        assert host.run() == "interrupted"
    assert time.monotonic() < began_at + 3


@thorough
@pytest.mark.parametrize("variable", [{}, {"NO_COLOR": "1"}])
def test_the_log_of_zenoh_has_no_colors_in_a_file(variable: dict[str, str]) -> None:
    code = (
        "import os, zenoh; from edgegossip.net.zenoh.links import log_as_environment_says;"
        "log_as_environment_says(); zenoh.open(zenoh.Config()).close();"
        "print('still', os.environ.get('NO_COLOR'))"
    )
    environment = {**os.environ, "RUST_LOG": "info", **variable}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "zenoh::net" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stdout.endswith(f"still {variable.get('NO_COLOR')}\n")
