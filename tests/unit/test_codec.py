"""Messages survive the wire bit for bit, and what is no message is refused."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st
from tests.tiers import thorough
from torch import Tensor

from edgegossip.contract import codec
from edgegossip.contract.protocol import Message

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


each_payload = pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)


def joined(message: Message) -> bytearray:
    return bytearray().join(codec.encode(message))


def require_same(got: Mapping[str, Tensor], payload: Mapping[str, Tensor]) -> None:
    assert got.keys() == payload.keys()
    for name, tensor in payload.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert safetensors.torch.save({"x": got[name]}) == safetensors.torch.save(
            {"x": tensor.contiguous()}
        )


@each_payload
def test_a_message_survives_bit_for_bit(payload: dict[str, Tensor]) -> None:
    got = codec.decode(joined(Message("params", 7, payload)))
    assert (got.kind, got.round) == ("params", 7)
    assert [*got.payload] == [*payload]
    require_same(got.payload, payload)


@each_payload
def test_safetensors_reads_what_we_write(payload: dict[str, Tensor], tmp_path: Path) -> None:
    data = bytes(joined(Message("params", 7, payload)))
    require_same(safetensors.torch.load(data), payload)
    path = tmp_path / "message.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"kind": "params", "round": "7"}


@each_payload
def test_we_read_what_safetensors_writes(payload: dict[str, Tensor]) -> None:
    metadata = {"kind": "params", "round": "7"}
    copies = {name: tensor.clone() for name, tensor in payload.items()}
    got = codec.decode(safetensors.torch.save(copies, metadata))
    assert (got.kind, got.round) == ("params", 7)
    require_same(got.payload, payload)


@pytest.mark.parametrize("kind", ["params", '"round":"5"', '\\"round":"5"'])
def test_messages_alike_are_told_apart_by_their_rounds(kind: str) -> None:
    for round in (0, 5, 12, 10**18, 10**19 - 1, 5):
        message = codec.decode(joined(Message(kind, round, {"round": torch.ones(3)})))
        assert (message.kind, message.round) == (kind, round)


def test_numbers_arrive_with_the_tensors_of_a_large_model() -> None:
    payload = {f"layers.{k}.weight": torch.zeros(1) for k in range(200)}
    numbers = {"weight": 0.125, "session": 3}
    message = codec.decode(joined(Message("params", 7, payload, numbers)))
    assert (message.round, message.numbers) == (7, numbers)
    assert message.payload.keys() == payload.keys()


def test_nothing_is_copied_on_the_way_out_and_in() -> None:
    x = torch.arange(4.0)
    _, part = codec.encode(Message("params", 0, {"x": x}))
    x[0] = 9
    assert torch.frombuffer(part, dtype=torch.float32)[0] == 9
    data = joined(Message("params", 0, {"x": x}))
    got = codec.decode(data)
    data[-16:-12] = bytes(4)
    assert got.payload["x"][0] == 0


def test_what_cannot_be_written_to_is_copied_once() -> None:
    got = codec.decode(bytes(joined(Message("params", 0, {"x": torch.zeros(3)}))))
    got.payload["x"].add_(1)
    assert got.payload["x"].tolist() == [1.0, 1.0, 1.0]


def test_tensors_are_aligned_whatever_their_order() -> None:
    payload = {str(k): torch.zeros(3, dtype=dtype) for k, dtype in enumerate(codec._CODES)}
    for tensor in codec.decode(joined(Message("x" * 3, 0, payload))).payload.values():
        assert tensor.data_ptr() % tensor.itemsize == 0


def test_a_gradient_and_another_memory_format_are_no_hindrance() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    got = codec.decode(joined(Message("params", 0, {"x": x}))).payload["x"]
    assert torch.equal(got, x)
    assert not got.requires_grad


@pytest.mark.parametrize(
    "payload",
    [
        {"x": torch.zeros(2, dtype=torch.complex64)},
        {"__metadata__": torch.zeros(2)},
        {"x": torch.zeros([1] * 17)},
        {str(k): torch.zeros(0) for k in range(5000)},
        {"x" * 2**20: torch.zeros(0)},
        {"\ud800": torch.zeros(0)},
    ],
    ids=["dtype", "name", "dimensions", "number", "header", "surrogate"],
)
def test_what_nobody_would_read_is_not_written(payload: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"cannot send|surrogates"):
        codec.encode(Message("params", 0, payload))


@each_payload
def test_the_size_is_known_without_encoding(payload: dict[str, Tensor]) -> None:
    message = Message("params", 7, payload)
    for _ in range(2):
        assert codec.num_bytes(message) == len(joined(message))


@settings(max_examples=30)
@given(kind=st.text(max_size=8), round=st.integers(-5, 10**9), size=st.integers(0, 2000))
def test_the_size_is_right_whatever_the_kind_round_and_shape(
    kind: str, round: int, size: int
) -> None:
    message = Message(kind, round, {"x": torch.zeros(size), "y": torch.zeros(1, size)})
    assert codec.num_bytes(message) == len(joined(message))
    got = codec.decode(joined(message))
    assert (got.kind, got.round) == (kind, round)


def test_a_decoded_message_shares_nothing_with_the_sent_one() -> None:
    x = torch.zeros(3)
    got = codec.decode(joined(Message("params", 0, {"x": x})))
    x += 1
    assert got.payload["x"].tolist() == [0.0, 0.0, 0.0]


GOOD = bytes(joined(Message("params", 3, {"x": torch.arange(4.0)})))
X = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
NOTHING = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
BOTH = {"kind": "params", "round": "3"}


def _with_header(header: object, content: bytes = GOOD[-16:]) -> bytes:
    compact = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    text = compact.encode()
    text = text.ljust(len(text) + -len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content


def _with(entries: dict[str, object], metadata: object = BOTH) -> bytes:
    return _with_header({"__metadata__": metadata, **entries})


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
    "metadata that is a list": lambda: _with({"x": X}, [1]),
    "more metadata": lambda: _with({"x": X}, {**BOTH, "more": ""}),
    "a round with a space": lambda: _with({"x": X}, {**BOTH, "round": " 3"}),
    "a round in Arabic digits": lambda: _with({"x": X}, {**BOTH, "round": "٣"}),
    "a round of 5000 digits": lambda: _with({"x": X}, {**BOTH, "round": "3" * 5000}),
    "a round with a zero before": lambda: _with({"x": X}, {**BOTH, "round": "03"}),
    "a round of minus nothing": lambda: _with({"x": X}, {**BOTH, "round": "-0"}),
    "a round in the wrong place": lambda: _with(
        {"x": {"dtype": "F32", "round": "3", "data_offsets": [0, 16]}}, {"kind": "params"}
    ),
    "a round in two places": lambda: _with({"x": {**X, "round": "3"}}),
    "a round that is a number": lambda: _with({"x": X}, {**BOTH, "round": 3}),
    "a header that is a list": lambda: _with_header([BOTH, X]),
    "a header that is not JSON": lambda: _with_header("{'x': 1}"),
    "a header not filled up": lambda: (104).to_bytes(8, "little") + b"{}" + bytes(GOOD[10:]),
    "a header of zeros": lambda: _with_header("\0" * 96),
    "a header nested deeply": lambda: _with_header("[" * 100_000),
    "a number of 5000 digits": lambda: _with_header('{"x": ' + "1" * 5000 + "}"),
    "a name twice": lambda: _with_header(
        f'{{"__metadata__": {json.dumps(BOTH)}, "x": {json.dumps(X)}, "x": {json.dumps(X)}}}'
    ),
    "a kind twice": lambda: _with_header(
        f'{{"__metadata__": {{"kind": "a", "kind": "b", "round": "3"}}, "x": {json.dumps(X)}}}'
    ),
    "an unknown dtype": lambda: _with({"x": {**X, "dtype": "C64", "shape": [2]}}),
    "a dtype that is a list": lambda: _with({"x": {**X, "dtype": ["F32"]}}),
    "a tensor of too few bytes": lambda: _with({"x": {**X, "shape": [5]}}),
    "a tensor of too many bytes": lambda: _with({"x": {**X, "shape": [3]}}),
    "a negative length": lambda: _with({"x": {**X, "shape": [-4]}}),
    "two negative lengths": lambda: _with({"x": {**X, "shape": [-2, -2]}}),
    "a length that is true": lambda: _with({"x": {**X, "shape": [4, True]}}),
    "a length with a point": lambda: _with({"x": {**X, "shape": [4.0]}}),
    "a shape that is a number": lambda: _with({"x": {**X, "shape": 4}}),
    "a hundred dimensions": lambda: _with({"x": {**X, "shape": [4] + [1] * 99}}),
    "a huge tensor of nothing": lambda: _with(
        {"x": X, "y": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [16, 16]}}
    ),
    "a tensor of nothing that is too large": lambda: _with(
        {"x": X, "y": {"dtype": "F32", "shape": [2**48, 0], "data_offsets": [16, 16]}}
    ),
    "something besides": lambda: _with({"x": {**X, "more": 1}}),
    "no place": lambda: _with({"x": {"dtype": "F32", "shape": [4]}}),
    "three places": lambda: _with({"x": {**X, "data_offsets": [0, 16, 16]}}),
    "a place outside": lambda: _with({"x": {**X, "data_offsets": [4, 20]}}),
    "a place before": lambda: _with({"x": {**X, "data_offsets": [-16, 0]}}),
    "a gap": lambda: _with({"x": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}}),
    "an overlap": lambda: _with({"x": X, "y": {**X, "data_offsets": [0, 16]}}),
    "a crooked place": lambda: _with(
        {
            "x": {"dtype": "F64", "shape": [1], "data_offsets": [1, 9]},
            "y": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "z": {"dtype": "U8", "shape": [7], "data_offsets": [9, 16]},
        }
    ),
    "too many tensors": lambda: _with_header(
        {
            "__metadata__": BOTH,
            **dict.fromkeys(map(str, range(codec.MAX_TENSORS + 1)), NOTHING),
        },
        b"",
    ),
    "a truth value of 2": lambda: _with_header(
        {"__metadata__": BOTH, "x": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}},
        b"\1\2",
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
        message = codec.decode(data)
    except ValueError:
        return
    assert joined(message)[-16:] == data[-16:]


@settings(max_examples=100)
@given(st.binary(max_size=300))
def test_bytes_by_chance_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="bytes are not a message"):
        codec.decode(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(sorted({*X, *BOTH, "__metadata__"})), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@thorough
@settings(max_examples=100)
@given(json_values, st.dictionaries(st.sampled_from("xyz"), json_values, max_size=3))
def test_a_header_of_anything_is_refused_or_read_but_never_a_crash(
    metadata: object, entries: dict[str, object]
) -> None:
    for data in (_with_header(metadata), _with(entries), _with({"x": X, **entries}, metadata)):
        with contextlib.suppress(ValueError):
            codec.decode(data)


def test_a_single_entry_of_a_strided_vector_can_be_sent() -> None:
    entry = torch.arange(14.0)[3::7][:1]
    message = Message("chunk", 0, {"x": entry})
    assert torch.equal(codec.decode(joined(message)).payload["x"], entry)
