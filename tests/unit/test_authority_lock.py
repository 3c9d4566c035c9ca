"""Several commands that change one authority's files at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgegossip.contract.errors import NetworkError
from edgegossip.net.identity.certificates import (
    common_name,
    holder_paths,
    is_pair,
    issue,
    issued,
    load_authority,
    load_certificate,
    load_key,
    make_authority,
)
from edgegossip.net.identity.revocation import revoke, revoked_serials

NUM_AT_ONCE = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_authority(tmp_path / "certs")
    return tmp_path / "certs"


def at_once(*tasks: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(tasks)) as pool:
        for future in [pool.submit(task) for task in tasks]:
            future.result()


def test_certificates_that_are_issued_at_once_are_all_recorded_and_can_be_revoked(
    folder: Path,
) -> None:
    at_once(*[lambda: issue(folder, [0, 1], replace=True)] * NUM_AT_ONCE)
    known = issued(folder)
    assert len({each.serial_number for each in known}) == 2 * NUM_AT_ONCE
    certificate, key = holder_paths(folder, 0)
    assert is_pair(load_certificate(certificate), load_key(key))
    revoke(folder, [0])
    assert revoked_serials(folder) == {
        each.serial_number for each in known if common_name(each.subject) == "worker-0"
    }


def test_revocations_at_once_and_during_issuing_are_all_in_the_list(folder: Path) -> None:
    issue(folder, range(NUM_AT_ONCE))
    first = {each.serial_number for each in issued(folder)}
    at_once(
        *[lambda rank=rank: revoke(folder, [rank]) for rank in range(NUM_AT_ONCE)],
        *[lambda: issue(folder, [0], replace=True)] * 2,
    )
    assert first <= revoked_serials(folder)
    assert len(issued(folder)) == NUM_AT_ONCE + 2


def test_of_two_authorities_made_at_once_one_is_left_whole(tmp_path: Path) -> None:
    refused = []

    def make() -> None:
        try:
            make_authority(tmp_path / "certs")
        except NetworkError as error:
            refused.append(str(error))

    at_once(*[make] * NUM_AT_ONCE)
    assert len(refused) == NUM_AT_ONCE - 1
    load_authority(tmp_path / "certs")  # its key is that of its certificate
