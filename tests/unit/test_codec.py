"""Messages survive the wire bit for bit, and what is no message is refused."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgegossip.core import codec
from edgegossip.core.protocol import Message

PAYLOADS: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "a number": {"weight": torch.tensor(0.1, dtype=torch.float64)},
    "no entries": {"x": torch.zeros(0, 3)},
    "odd floats": {"x": torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-45])},
    "many kinds": {
        "half": torch.arange(5).half(),
        "bfloat": torch.arange(5).bfloat16(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "whole": torch.tensor([2**62, -1]),
        "flags": torch.tensor([True, False]),
    },
    "views": {"column": torch.arange(12.0).view(3, 4)[:, 1], "rest": torch.arange(9.0)[4:]},
    "one storage": dict(zip("ab", torch.arange(8.0).tensor_split(2), strict=True)),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_message_survives_bit_for_bit(payload: dict[str, Tensor]) -> None:
    got = codec.decode(codec.encode(Message("params", 7, payload)))
    assert (got.kind, got.round) == ("params", 7)
    assert got.payload.keys() == payload.keys()
    for name, tensor in payload.items():
        assert got.payload[name].dtype == tensor.dtype
        assert got.payload[name].shape == tensor.shape
        assert safetensors.torch.save({"x": got.payload[name]}) == safetensors.torch.save(
            {"x": tensor.contiguous()}
        )


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_the_size_is_known_without_encoding(payload: dict[str, Tensor]) -> None:
    message = Message("params", 7, payload)
    for _ in range(2):
        assert codec.num_bytes(message) == len(codec.encode(message))


@settings(max_examples=30)
@given(kind=st.text(max_size=8), round=st.integers(-5, 10**9), size=st.integers(0, 2000))
def test_the_size_is_right_whatever_the_kind_round_and_shape(
    kind: str, round: int, size: int
) -> None:
    message = Message(kind, round, {"x": torch.zeros(size), "y": torch.zeros(1, size)})
    assert codec.num_bytes(message) == len(codec.encode(message))
    got = codec.decode(codec.encode(message))
    assert (got.kind, got.round) == (kind, round)


def test_a_decoded_message_shares_nothing_with_the_sent_one() -> None:
    x = torch.zeros(3)
    got = codec.decode(codec.encode(Message("params", 0, {"x": x})))
    x += 1
    assert got.payload["x"].tolist() == [0.0, 0.0, 0.0]


GOOD = codec.encode(Message("params", 3, {"x": torch.arange(4.0)}))


def _without(key: str) -> bytes:
    metadata = {"kind": "params", "round": "3"}
    del metadata[key]
    return safetensors.torch.save({"x": torch.zeros(1)}, metadata=metadata)


BAD: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "seven bytes": lambda: GOOD[:7],
    "a torn header": lambda: GOOD[:40],
    "a torn tensor": lambda: GOOD[:-1],
    "bytes behind it": lambda: GOOD + b"x",
    "an endless header": lambda: b"\xff" * 8 + GOOD[8:],
    "a pickle": lambda: pickle.dumps({"kind": "params", "round": 3}),
    "no kind": lambda: _without("kind"),
    "no round": lambda: _without("round"),
    "no metadata": lambda: safetensors.torch.save({"x": torch.zeros(1)}),
    "a round in words": lambda: safetensors.torch.save(
        {}, metadata={"kind": "a", "round": "three"}
    ),
    "metadata that is a list": lambda: (
        len(text := json.dumps({"__metadata__": [1]}).encode()).to_bytes(8, "little") + text
    ),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_message_is_refused(data: Callable[[], bytes]) -> None:
    with pytest.raises(ValueError, match="bytes are not a message"):
        codec.decode(data())


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_a_damaged_message_is_refused_or_read_but_never_a_crash(at: int, change: int) -> None:
    data = bytearray(GOOD)
    data[at] ^= change
    try:
        message = codec.decode(bytes(data))
    except ValueError:
        return
    assert isinstance(message.payload, dict)
