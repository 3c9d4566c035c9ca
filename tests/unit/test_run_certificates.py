"""Certificates that are valid in one run only, between real sessions on loopback."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.certificate_folders import give
from tests.certified_machines import Machines, exchange, meet
from tests.zenoh_workers import RUN, Worker, wait_until

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Rank
from edgegossip.net.identity.certificates import issue


def bind(machines: Machines, rank: Rank, run_name: str, folder: Path) -> Path:
    issue(machines.authority, [rank], run_name=run_name, replace=True)
    return give(machines.authority, folder, rank)


def test_a_certificate_of_a_run_is_good_in_it_beside_others(
    machines: Machines, tmp_path: Path
) -> None:
    bound = bind(machines, 1, "night", tmp_path / "bound")
    first = machines.open(0, run=f"night:{RUN}")
    second = machines.open(1, run=f"night:{RUN}", folder=bound)
    meet(first, second)
    exchange(first, second)


def test_a_certificate_of_another_run_gets_nothing_through(
    machines: Machines, opened: ExitStack, tmp_path: Path
) -> None:
    bound = bind(machines, 2, "night", tmp_path / "bound")
    run = f"day:{RUN}"
    with pytest.raises(NetworkError, match="valid only in runs named 'night'"):
        machines.open(2, run=run, folder=bound)
    first, second = machines.open(0, run=run), machines.open(1, run=run)
    meet(first, second)
    impostor = Worker(bound, 2, *machines.endpoints[:2], run=run, is_careful=False)
    opened.callback(impostor.session.close)
    for member in (first, second):
        kind, rank, reason = member.events.next()
        assert (kind, rank) == ("refused", None)
        assert reason == "a link from 'worker-2@night', which is valid only in other runs"
    impostor.watch("**")
    for sender in (1, 2):
        impostor.send(0, b"forged", sender=sender)
    first.transport.send(2, [b"secret"])
    exchange(first, second)
    exchange(first, second)
    assert {payload for _, payload in impostor.received} <= {b"forged"}  # its own
    assert {*impostor.alive} <= {"/alive/2/7"}


@pytest.mark.slow
@pytest.mark.parametrize(("known", "is_passed"), [(["night"], True), ([], False)])
def test_a_router_passes_a_bound_worker_on_only_where_it_is_told_the_run(
    machines: Machines,
    opened: ExitStack,
    tmp_path: Path,
    known: list[str],
    is_passed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = machines.router(known)
    bound = bind(machines, 1, "night", tmp_path / "bound")
    first = machines.open(0, endpoint, f"night:{RUN}")
    second = machines.open(1, endpoint, f"night:{RUN}", folder=bound)
    if is_passed:
        meet(first, second)
        exchange(first, second)
    else:
        wait_until(lambda: "not forwarding: a link from 'worker-1@night'" in caplog.text)
    # In no other run, whatever it says.
    day = machines.open(2, endpoint, f"day:{RUN}")
    impostor = Worker(bound, 1, endpoint, run=f"day:{RUN}", is_careful=False)
    opened.callback(impostor.session.close)
    own = machines.open(0, endpoint, f"day:{RUN}")
    meet(day, own)
    impostor.watch("**")
    impostor.send(2, b"garbage")
    exchange(day, own)
    assert {payload for _, payload in impostor.received} <= {b"garbage"}  # its own
    assert 1 not in day.here


@pytest.mark.slow
def test_a_bound_router_serves_its_run_only(machines: Machines, tmp_path: Path) -> None:
    issue(machines.authority, [None], run_name="night", replace=True)
    give(machines.authority, machines.folder(None), None)
    message = "valid only in runs named 'night'; give --run night"
    with pytest.raises(NetworkError, match=message):
        machines.router()
    endpoint = machines.router(["night"])
    ends = [machines.open(rank, endpoint, f"night:{RUN}") for rank in range(2)]
    meet(*ends)
    exchange(*ends)
    first = machines.open(0, endpoint, f"day:{RUN}")
    kind, _, reason = first.events.next()
    assert kind == "refused"
    assert "edgegossip-router@night" in reason or "of this run" in reason
