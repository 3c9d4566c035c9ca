"""Nothing reaches an algorithm but what was sent to it, as its schema says."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from benchmarks.corpus import frames
from hypothesis import given, settings, strategies as st
from tests.bad_frames import make_frame
from tests.fuzz import Fuzzer, admission, is_as_described
from torch import Tensor

from edgegossip.contract.protocol import Message
from edgegossip.contract.schema import MessageSpec, TensorSpec
from edgegossip.net.guard.admission import Admission, Admitted, Refusals, Refused
from edgegossip.net.guard.envelope import Envelope, pack

X = torch.arange(4.0)
RUN = b"run 0001"
SCHEMA = {
    "params": MessageSpec(
        {"x": TensorSpec.like(X)},
        optional={"weight": TensorSpec(torch.float64, (), minimum=0)},
        max_ahead=2,
    ),
    "last": MessageSpec(max_round=9),
    "bye": MessageSpec(),
}


def make(**settings: Any) -> Admission:  # noqa: ANN401
    return Admission(**{"run": RUN, "rank": 0, "num_workers": 3, "schema": SCHEMA, **settings})


def frame(
    kind: str = "params",
    round: int = 5,
    payload: dict[str, Tensor] | None = None,
    run: bytes = RUN,
    sender: int = 1,
) -> bytearray:
    message = Message(kind, round, {"x": X} if payload is None else payload)
    return bytearray().join(pack(Envelope(run, sender, 1, 1, 1), message))


def weight(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


GOOD: dict[str, bytearray] = {
    "plain": frame(),
    "optional": frame(payload={"weight": weight(0.5), "x": X}),
    "old": frame(round=0),
    "just ahead": frame(round=7),
    "empty": frame("bye", 10**9, {}),
    "the last": frame("last", 9, {}),
}
NAN = torch.tensor([0.0, math.nan, 0.0, 0.0])
BAD: dict[str, tuple[bytearray, str]] = {
    "noise": (bytearray(b"noise" * 50), "no message"),
    "damage": (frame()[:-1] + b"\x01", "no message"),
    "run": (frame(run=b"run 0002"), "of another run"),
    "name": (frame(sender=2), "in another's name"),
    "own name": (frame(sender=0), "in another's name"),
    "kind": (frame("news"), "of unknown kind"),
    "round": (frame(round=8), "of an impossible round"),
    "after the last": (frame("last", 10, {}), "of an impossible round"),
    "negative round": (frame("bye", -1, {}), "of an impossible round"),
    "missing": (frame(payload={"weight": weight(0.5)}), "of another form"),
    "unknown": (frame(payload={"x": X, "y": X}), "of another form"),
    "shape": (frame(payload={"x": X[:3]}), "of another form"),
    "dtype": (frame(payload={"x": X.double()}), "of another form"),
    "optional shape": (frame(payload={"x": X, "weight": X}), "of another form"),
    "not a number": (frame(payload={"x": NAN}), "with bad values"),
    "infinite": (frame(payload={"x": X / 0}), "with bad values"),
    "negative weight": (frame(payload={"x": X, "weight": weight(-1)}), "with bad values"),
    "size": (frame(payload={"x": torch.zeros(10**6)}), "too large"),
}


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
def test_what_fits_the_schema_is_let_in(data: bytearray) -> None:
    verdict = make().admit(1, data, own_round=5)
    assert isinstance(verdict, Admitted)
    assert verdict.envelope.sender == 1
    assert not verdict.left_out


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_what_does_not_is_refused(data: bytearray, reason: str) -> None:
    checks, refusals = make(), Refusals({1, 2})
    for _ in range(2):
        verdict = checks.admit(1, data, own_round=5)
        assert isinstance(verdict, Refused)
        refusals.add(verdict)
    assert refusals.counts == {(1, reason): 2}


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD)
def test_only_what_its_sender_alone_can_cause_is_a_lie(data: bytearray, reason: str) -> None:
    lies = {
        "in another's name",
        "of an impossible round",
        "of another form",
        "with bad values",
    }
    verdict = make().admit(1, data, own_round=5)
    assert isinstance(verdict, Refused)
    assert verdict.is_lie == (reason in lies)


@pytest.mark.parametrize("sender", [0, 3, -1, 10**30])
def test_only_the_other_workers_of_the_run_are_heard(sender: int) -> None:
    data = frame(sender=sender) if 0 <= sender < 2**63 else frame()
    verdict = make().admit(sender, data, own_round=5)
    assert verdict == Refused(sender, "not from another worker of this run")
    refusals = Refusals({1, 2})
    refusals.add(verdict)
    assert refusals.counts == {(None, "not from another worker of this run"): 1}


def test_a_muted_worker_is_not_heard() -> None:
    checks = make()
    assert [checks.strikes.add(1) for _ in range(3)] == [False, False, True]
    assert checks.admit(1, frame(), own_round=5) == Refused(1, "no longer heard")
    assert isinstance(checks.admit(2, frame(sender=2), own_round=5), Admitted)


def test_one_line_for_each_worker_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    checks, refusals = make(), Refusals({1, 2})
    with caplog.at_level(logging.WARNING, "edgegossip.net"):
        for _ in range(3):
            for verdict in (
                checks.admit(1, frame(payload={"x": X[:3]}), 5),
                checks.admit(2, frame(sender=2, payload={"x": NAN}), 5),
                Refused(None, "a lost chunk"),
            ):
                assert isinstance(verdict, Refused)
                refusals.add(verdict)
    assert caplog.messages == [
        "dropped input from worker 1: of another form ('params': tensor 'x' is torch.float32 "
        "[3] instead of torch.float32 [4]); more of it is only counted",
        "dropped input from worker 2: with bad values ('params': tensor 'x' has values that "
        "are not finite or not in [-inf, inf]); more of it is only counted",
        "dropped input from a stranger: a lost chunk; more of it is only counted",
    ]


def test_neither_log_nor_memory_is_flooded(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals({1, 2})
    for k in range(5000):
        refusals.add(Refused(k, f"reason {k}"))
    verdict = make().admit(1, frame("x" * 500_000), 5)
    assert isinstance(verdict, Refused)
    refusals.add(verdict)
    assert len(refusals.counts) <= 1001
    assert sum(refusals.counts.values()) == 5001
    assert len(caplog.messages) <= 1001
    assert max(map(len, caplog.messages)) < 500


def test_the_largest_message_of_the_schema_passes_and_the_limit_can_be_lowered() -> None:
    names = {f"{'x' * 1000}{k}": torch.zeros(100) for k in range(900)}
    spec = MessageSpec({name: TensorSpec.like(x) for name, x in names.items()})
    data = frame(payload=names)
    assert isinstance(make(schema={"params": spec}).admit(1, data, 5), Admitted)
    lowered = make(schema={"params": spec}, max_bytes=len(data) - 1).admit(1, data, 5)
    assert isinstance(lowered, Refused)
    assert lowered.reason == "too large"
    assert isinstance(make(schema={}).admit(1, data, 5), Refused)


def test_tensors_are_views_of_the_frame() -> None:
    data = frame()
    verdict = make().admit(1, data, 5)
    assert isinstance(verdict, Admitted)
    data[-4:] = bytes(4)
    assert verdict.message.payload["x"].tolist() == [0.0, 1.0, 2.0, 0.0]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_nothing_is_accepted_that_was_not_sent(draw: random.Random) -> None:
    sent = frames()
    data, is_forged = make_frame(sent, draw)
    copy = bytes(data)
    verdict = admission().admit(2, data, own_round=40)
    if isinstance(verdict, Admitted):
        assert copy in sent or is_forged
        assert is_as_described(verdict.message)


def test_a_thousand_damaged_messages_do_no_harm() -> None:
    fuzzer = Fuzzer(seed=1)
    fuzzer.run(1000)
    counts: Counter[str] = fuzzer.counts
    assert counts["errors"] == counts["wrongly_accepted"] == 0
    # It damages lightly enough to try every check.
    assert counts["accepted"] > 30
    assert len(fuzzer.refusals.counts) >= 7
