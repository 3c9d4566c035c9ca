"""What a worker has written counts where it was written for, unchanged, and nowhere else."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from edgegossip.core.errors import NetworkError
from edgegossip.core.protocol import Message
from edgegossip.core.schema import MessageSpec
from edgegossip.net.certificates import issue, make_authority
from edgegossip.net.seals import SEAL, Part, Seals, parts_of, with_seals
from edgegossip.net.tls import TLS

RUN, LIFE, RANK = b"run 0001", 7, 1
OWN = {"values": torch.arange(5.0), "until": torch.tensor(3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_authority(folder)
    issue(folder, [0, 1, 2])
    return folder


def seals(folder: Path, rank: int, run: bytes = RUN) -> Seals:
    return Seals(TLS.from_folder(folder, rank), rank, run)


def message(content: Mapping[str, Tensor] = OWN, rank: int = RANK, round: int = 4) -> Message:
    return Message("params", round, {f"{rank}.{name}": x for name, x in content.items()})


def sealed(folder: Path) -> Message:
    return seals(folder, RANK).sealed(message(), LIFE)


def life_of(folder: Path, message: Message, run: bytes = RUN) -> int | None:
    """What worker 0 makes of it."""
    (part,) = parts_of(message.payload)
    return seals(folder, 0, run).is_genuine(message, part)


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
    told, draw = sealed(folder), random.Random(0)
    assert life_of(folder, told) == LIFE
    for _ in range(150):
        name = draw.choice([*told.payload])
        changed = told.payload[name].clone().reshape(-1)
        octets = changed.view(torch.uint8)
        octets[draw.randrange(len(octets))] ^= 1 << draw.randrange(8)
        changed = changed.view(told.payload[name].shape)
        payload = {**told.payload, name: changed}
        assert life_of(folder, replace(told, payload=payload)) is None, name


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
    assert parts_of({"0.x": X, f"0.{SEAL}": X})[0].payload.keys() == {"x", SEAL}


def test_an_empty_part_is_not_genuine(folder: Path) -> None:
    assert seals(folder, 0).is_genuine(message(), Part(RANK, {})) is None


def test_a_key_that_cannot_sign_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(ED25519)
    tls = replace(TLS.from_folder(folder, RANK), key=key)
    with pytest.raises(NetworkError, match="no elliptic-curve key"):
        Seals(tls, RANK, RUN)


ED25519 = b"""-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f
-----END PRIVATE KEY-----
"""
