"""Workers announce their settings when they meet, and others check them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.hosts import EPOCHS, make_host

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Message, Rank
from edgegossip.net.host.introduction import (
    INTRODUCTION,
    MAX_BYTES,
    SPEC,
    Introduction,
    Introductions,
)
from edgegossip.net.host.receiving import Appeared
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.introduction import sketch

OWN: dict[str, Any] = {"lr": 0.1, "parameters": [5.0, 0.25, -0.5], "seed": 0}


def account(**changes: Any) -> Message:  # noqa: ANN401
    return Introduction(settings=OWN | changes, versions={"torch": "2.5"}).message()


def meet(num_workers: int, **others: dict[str, Any]) -> Introductions:
    """Worker 0, whom `worker_R` has told how its settings differ."""
    own = Introduction(settings=OWN, versions={"torch": "2.5"})
    introductions = Introductions(num_workers, own)
    for name, changes in others.items():
        rank = int(name.rpartition("_")[2])
        introductions.take(rank, account(**changes))
    return introductions


def said(text: bytes) -> Message:
    return Message(INTRODUCTION, 0, {"text": torch.tensor(list(text), dtype=torch.uint8)})


def test_equal_settings_do_not_differ_and_those_that_do_are_named() -> None:
    met = meet(4, worker_1={}, worker_2={"lr": 0.05, "momentum": 0.9}, worker_3={"lr": None})
    assert met.difference(1) == ""
    assert met.difference(2) == "lr 0.05, this one 0.1; 'momentum' 0.9, this one none"
    assert met.difference(3) == "lr none, this one 0.1"


def test_parameters_may_differ_by_rounding_and_no_more() -> None:
    met = meet(
        3,
        worker_1={"parameters": [5.0001, 0.2501, -0.5001]},
        worker_2={"parameters": [5.0, 0.35, -0.5]},
    )
    assert met.difference(1) == ""
    assert met.difference(2) == "other parameters"


def test_vectors_that_differ_by_rounding_have_one_sketch_and_no_others_have() -> None:
    generator = torch.Generator().manual_seed(0)
    vector, other = torch.randn(2, 10_000, generator=generator)
    own = sketch(vector)
    met = meet(3, worker_1={"parameters": own}, worker_2={"parameters": sketch(other)})
    assert met.difference(1) == met.difference(2) == "other parameters"
    rounded = sketch(vector * (1 + 1e-6 * torch.randn(10_000, generator=generator)))
    assert own == pytest.approx(rounded, abs=1e-4)
    assert own != pytest.approx(sketch(vector.flip(0)), abs=1e-2)


def test_other_versions_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    introductions = meet(2)
    other = Introduction(settings=OWN, versions={"torch": "2.6"})
    for _ in range(2):  # once more when its link is back
        introductions.take(1, other.message())
    introductions.require_majority(is_waiting=False)
    assert caplog.text.count('worker 1 has torch "2.6", this one "2.5": numbers may') == 1


def test_an_incompatible_protocol_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    introductions = meet(2)
    monkeypatch.setattr("edgegossip.net.host.introduction.PROTOCOL", 99)
    introductions.take(1, account())
    with pytest.raises(NetworkError, match="worker 1 has network protocol 99, this one 5"):
        introductions.require_majority(is_waiting=True)


@pytest.mark.parametrize(
    "text",
    [b"\xff", b"[]", b"[1, 2]", b'[{"lr": {}}, {}]', b'[{"lr": ["x"]}, {}]', b"[" * 60_000],
    ids=["bytes", "empty", "numbers", "nested", "words", "deep"],
)
def test_what_cannot_be_read_is_a_difference(text: bytes) -> None:
    introductions = meet(2)
    introductions.take(1, said(text))
    assert introductions.difference(1) == "an introduction that cannot be read"


def test_what_strangers_write_makes_no_line_of_its_own_in_the_log() -> None:
    introductions = meet(2)
    introductions.take(
        1, said(json.dumps([{"a\n\x1b[2J" + "x" * 999: "b\n" * 99}, {}]).encode())
    )
    assert not set("\n\x1b") & set(introductions.difference(1))
    assert len(introductions.difference(1)) < 500


DIFFERENT = {"lr": 0.05}


@pytest.mark.parametrize(
    ("num_workers", "others", "is_waiting", "must_end"),
    [
        (2, [DIFFERENT], True, True),
        (3, [DIFFERENT], True, False),
        (3, [DIFFERENT], False, True),
        (3, [DIFFERENT, {}], False, False),
        (3, [DIFFERENT, DIFFERENT], True, True),
        (4, [DIFFERENT, DIFFERENT, {}], False, True),
        (5, [DIFFERENT, DIFFERENT, {}, {}], False, False),
        (5, [{}, {}, {}, {}], False, False),
    ],
)
def test_a_worker_whose_settings_most_do_not_have_ends(
    num_workers: int, others: list[dict[str, Any]], is_waiting: bool, must_end: bool
) -> None:
    named = {f"worker_{rank}": each for rank, each in enumerate(others, 1)}
    introductions = meet(num_workers, **named)
    if must_end:
        with pytest.raises(NetworkError, match=r"lr 0\.05, this one 0\.1.*--name"):
            introductions.require_majority(is_waiting=is_waiting)
    else:
        introductions.require_majority(is_waiting=is_waiting)


def test_another_process_of_a_rank_may_have_the_right_settings() -> None:
    receiving = make_host(EPOCHS, 0, MemoryNetwork()).receiving
    receiving.take(Appeared(1, 5), 0, 0.0)
    receiving.introductions.take(1, account(lr=0.5))
    receiving.take(Appeared(1, 5), 0, 0.0)  # its link was cut for a moment
    assert receiving.introductions.difference(1)
    receiving.take(Appeared(1, 6), 0, 0.0)
    assert not receiving.introductions.difference(1)


@pytest.mark.parametrize("num_settings", [10, 5000])
def test_an_introduction_is_of_bounded_size_however_much_there_is_to_say(
    num_settings: int,
) -> None:
    settings = {f"task.{index}": "x" * 1000 for index in range(num_settings)}
    one, same, other = (
        Introduction(settings=settings | changes) for changes in ({}, {}, {"task.7": "y"})
    )
    message = one.message()
    assert message.payload["text"].numel() <= MAX_BYTES
    assert SPEC.mismatch(message.payload) is None
    introductions = Introductions(3, one)
    rank: Rank
    for rank, each in ((1, same), (2, other)):
        introductions.take(rank, each.message())
    assert introductions.difference(1) == ""
    assert "other task" in introductions.difference(2)


@pytest.mark.parametrize(
    "text", [b"5", b"null", b"[]", b'"ab"', b'[{"parameters": [1%b, 2, 3]}, {}]']
)
def test_no_account_of_another_worker_raises_anything(text: bytes) -> None:
    met = meet(4)
    met.take(1, said(text.replace(b"%b", b"0" * 400)))
    assert met.difference(1) == "an introduction that cannot be read"
