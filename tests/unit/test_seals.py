"""A worker's file counts only unchanged, and only in the run it was written for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.serialization import Encoding
from torch import Tensor

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Message
from edgegossip.contract.schema import MessageSpec, TensorSpec, by_origin
from edgegossip.net.guard.admission import Admission, Admitted
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.guard.seals import SEAL, Seal, Seals, with_seals
from edgegossip.net.identity.certificates import issue, load_certificate, make_authority
from edgegossip.net.identity.revocation import revoke
from edgegossip.net.identity.tls import TLS, Credentials, IdentityFiles

RUN, LIFE, RANK = b"run 0001", 7, 1
OWN = {"values": torch.arange(5.0), "until": torch.tensor(3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_authority(folder)
    issue(folder, [0, 1, 2])
    return folder


def seals(folder: Path, rank: int, run: bytes = RUN) -> Seals:
    credentials = TLS.from_folder(folder, rank).check(rank)
    return Seals(lambda: credentials, rank, run)


def message(content: Mapping[str, Tensor] = OWN, rank: int = RANK, round: int = 4) -> Message:
    return Message("params", round, {f"{rank}.{name}": x for name, x in content.items()})


def sealed(folder: Path) -> Message:
    return seals(folder, RANK).sealed(message(), LIFE)


def life_of(folder: Path, message: Message, run: bytes = RUN) -> int | None:
    """Return worker 0's verdict."""
    ((origin, part),) = by_origin(message.payload).items()
    seal = seals(folder, 0, run).read(message, origin, part)
    assert seal is None or seal.flaw is None
    return None if seal is None else seal.life


class Watched:
    """A worker's seals, whose certificates may change meanwhile."""

    def __init__(self, folder: Path, rank: int, *run_names: str) -> None:
        self.credentials = TLS.from_folder(folder, rank).check(rank, run_names)
        self.seals = Seals(lambda: self.credentials, rank, RUN)

    def take(self, credentials: Credentials) -> None:
        self.credentials = credentials

    def reads(self, message: Message, origin: int = RANK) -> Seal | None:
        return self.seals.read(message, origin, by_origin(message.payload)[origin])


def test_whoever_gets_a_part_knows_that_it_is_genuine_and_of_which_life(folder: Path) -> None:
    told = sealed(folder)
    assert life_of(folder, told) == LIFE
    # In other messages of the round it is as good, in whatever order.
    again = replace(told, payload=dict([*told.payload.items()][::-1]), numbers={"exchange": 2})
    assert life_of(folder, again) == LIFE


def test_it_counts_nowhere_else(folder: Path) -> None:
    told = sealed(folder)
    assert life_of(folder, replace(told, round=5)) is None
    assert life_of(folder, replace(told, kind="catch-up")) is None
    assert life_of(folder, told, run=b"run 0002") is None
    renamed = {name.replace("1.", "2.", 1): x for name, x in told.payload.items()}
    assert life_of(folder, replace(told, payload=renamed)) is None


def test_no_bit_can_be_changed(folder: Path) -> None:
    told, draw, other = sealed(folder), random.Random(0), Watched(folder, 0)
    assert other.reads(told) == Seal(LIFE, None)
    for _ in range(150):
        name = draw.choice([*told.payload])
        changed = told.payload[name].clone().reshape(-1)
        octets = changed.view(torch.uint8)
        octets[draw.randrange(len(octets))] ^= 1 << draw.randrange(8)
        changed = changed.view(told.payload[name].shape)
        payload = {**told.payload, name: changed}
        assert other.reads(replace(told, payload=payload)) is None, name


def test_nothing_can_be_left_out_added_or_made_up(folder: Path) -> None:
    told = sealed(folder)
    for name in told.payload:
        less = {other: x for other, x in told.payload.items() if other != name}
        assert life_of(folder, replace(told, payload=less)) is None
    assert life_of(folder, replace(told, payload={**told.payload, "1.more": X})) is None
    for length in (0, 1, 10, 100, 4096):
        forged = {**told.payload, f"1.{SEAL}": torch.zeros(length, dtype=torch.uint8)}
        assert life_of(folder, replace(told, payload=forged)) is None


X = torch.zeros(1)


def test_a_certificate_of_another_worker_or_authority_is_not_enough(
    folder: Path, tmp_path: Path
) -> None:
    forged = seals(folder, 2).sealed(message(rank=2), LIFE)
    as_if = {name.replace("2.", "1.", 1): x for name, x in forged.payload.items()}
    assert life_of(folder, replace(forged, payload=as_if)) is None
    make_authority(tmp_path)
    issue(tmp_path, [RANK])
    assert life_of(folder, sealed(tmp_path)) is None


def test_only_the_own_part_is_sealed_and_once_for_all_receivers(folder: Path) -> None:
    own = seals(folder, RANK)
    both = replace(message(), payload={**message().payload, "2.values": X})
    once, again = own.sealed(both, LIFE), own.sealed(message(), LIFE)
    assert {*once.payload} == {*both.payload, f"{RANK}.{SEAL}"}
    assert once.payload[f"{RANK}.{SEAL}"] is again.payload[f"{RANK}.{SEAL}"]
    assert life_of(folder, own.sealed(message(), LIFE + 1)) == LIFE + 1
    others = message(rank=2)
    assert own.sealed(others, LIFE) is others


def test_a_schema_has_seals_where_messages_are_passed_on() -> None:
    schema = {"a": MessageSpec({"x": X}), "b": MessageSpec({"0.x": X}, is_passed_on=True)}
    changed = with_seals(schema, 2)
    assert changed["a"] is schema["a"]
    assert {*changed["b"].optional} == {f"0.{SEAL}", f"1.{SEAL}"}


def test_an_empty_part_is_not_genuine(folder: Path) -> None:
    assert seals(folder, 0).read(message(), RANK, {}) is None


# Certificates that change, or are no longer valid.


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """As `folder`, to be changed by a test."""
    make_authority(tmp_path / "authority")
    issue(tmp_path / "authority", [0, 1, 2])
    return tmp_path / "authority"


def of_another_time(authority: Path, rank: int, begin: datetime) -> Credentials:
    """Those of a worker whose certificate is valid for a day."""
    issue(authority, [rank], days=1, begin=begin, replace=True)
    contents = TLS.from_folder(authority, rank).contents()
    ca, certificate, key = (each or b"" for each in contents[:3])
    return Credentials(IdentityFiles(ca, certificate, key), {})


def test_a_new_certificate_is_sealed_with_as_soon_as_it_is_there(authority: Path) -> None:
    one, other = Watched(authority, RANK), Watched(authority, 0)
    before = one.seals.sealed(message(), LIFE)
    issue(authority, [RANK], replace=True)
    one.take(TLS.from_folder(authority, RANK).check(RANK))
    after = one.seals.sealed(message(), LIFE)
    new = one.credentials.identity.holder.public_bytes(Encoding.DER)
    seals = [each.payload[f"{RANK}.{SEAL}"].numpy().tobytes() for each in (before, after)]
    assert [each.endswith(new) for each in seals] == [False, True]
    assert other.reads(before) == other.reads(after) == Seal(LIFE, None)


def test_a_new_authority_is_believed_as_soon_as_it_is_there(
    authority: Path, tmp_path: Path
) -> None:
    make_authority(tmp_path / "new")
    issue(tmp_path / "new", [RANK])
    told, other = sealed(tmp_path / "new"), Watched(authority, 0)
    assert other.reads(told) is None
    both = (tmp_path / "new" / "ca.pem").read_bytes() + (authority / "ca.pem").read_bytes()
    other.take(
        replace(other.credentials, identity=replace(other.credentials.identity, ca=both))
    )
    assert other.reads(told) == Seal(LIFE, None)


@pytest.mark.parametrize("days", [-10, 10], ids=["expired", "not valid yet"])
def test_a_seal_of_another_time_is_known_from_a_made_up_one(authority: Path, days: int) -> None:
    one = Watched(authority, RANK)
    one.take(of_another_time(authority, RANK, datetime.now(UTC) + timedelta(days=days)))
    told, other = one.seals.sealed(message(), LIFE), Watched(authority, 0)
    seal = other.reads(told)
    assert seal is not None
    assert seal.life == LIFE
    assert seal.flaw is not None
    assert seal.flaw.startswith("valid from 20")
    assert other.reads(replace(told, round=5)) is None


def test_a_seal_is_good_no_more_once_its_certificate_is_revoked_or_banned(
    authority: Path,
) -> None:
    told, other = sealed(authority), Watched(authority, 0)
    assert other.reads(told) == Seal(LIFE, None)
    serial = load_certificate(authority / f"worker-{RANK}.pem").serial_number
    other.take(replace(other.credentials, banned=frozenset([serial])))
    assert other.reads(told) == Seal(LIFE, "revoked")
    revoke(authority, [RANK])
    other.take(TLS.from_folder(authority, 0).check(0))
    assert other.reads(told) == Seal(LIFE, "revoked")


def test_a_certificate_for_one_run_seals_in_that_run_only(authority: Path) -> None:
    issue(authority, [RANK], run_name="night", replace=True)
    told = Watched(authority, RANK, "night").seals.sealed(message(), LIFE)
    assert Watched(authority, 0, "night").reads(told) == Seal(LIFE, None)
    assert Watched(authority, 0, "day").reads(told) is None


def test_who_passes_on_what_is_sealed_with_an_old_certificate_has_not_lied(
    authority: Path,
) -> None:
    """Worker 2's part is dropped; that of worker 1, which has taken it in before, is not."""
    neighbor, origin = Watched(authority, 1), Watched(authority, 2)
    origin.take(of_another_time(authority, 2, datetime.now(UTC) - timedelta(days=10)))
    parts = origin.seals.sealed(message(rank=2), LIFE), neighbor.seals.sealed(message(), LIFE)
    told = replace(message(), payload={**parts[0].payload, **parts[1].payload})
    schema = {
        "params": MessageSpec({}, {k: TensorSpec.like(x) for k, x in told.payload.items()})
    }
    schema = with_seals({"params": replace(schema["params"], is_passed_on=True)}, 3)
    seals = Watched(authority, 0).seals
    admission = Admission(run=RUN, rank=0, num_workers=3, schema=schema, seals=seals)
    frame = bytearray().join(pack(Envelope(RUN, 1, LIFE, 1, 1), told))
    verdict = admission.admit(1, memoryview(frame), 4)
    assert isinstance(verdict, Admitted)
    assert by_origin(verdict.message.payload).keys() == {1}
    [left_out] = verdict.left_out
    assert (left_out.rank, left_out.is_lie) == (2, False)
    assert left_out.reason == "with a certificate that is no longer valid"


# Keys that cannot sign.


def with_key(credentials: Credentials, key: bytes) -> Credentials:
    return replace(credentials, identity=replace(credentials.identity, key=key))


def test_a_key_that_cannot_sign_is_said_at_once(folder: Path) -> None:
    credentials = with_key(TLS.from_folder(folder, RANK).check(RANK), ED25519)
    with pytest.raises(NetworkError, match="key of worker-1 is not an elliptic-curve key"):
        Seals(lambda: credentials, RANK, RUN)


def test_one_that_comes_later_is_not_sealed_with(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = Watched(folder, RANK)
    one.take(with_key(one.credentials, ED25519))
    told = one.seals.sealed(message(), LIFE)
    assert one.seals.sealed(message(), LIFE + 1) != told
    assert life_of(folder, told) == LIFE
    assert len(caplog.messages) == 1
    assert "sealed with the previous certificate: the key of worker-1" in caplog.text


ED25519 = b"""-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f
-----END PRIVATE KEY-----
"""
