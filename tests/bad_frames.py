"""Frames of messages that are damaged, forged, or in which something is wrong."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from benchmarks.corpus import OWN_LIFE, PARAMS, RUN, SCHEMA, SENDER, SENDER_LIFE, SENT
from tests.byte_mutations import cut_out, flip_bits, join, make_extreme, put_in, repeat, swap
from torch import Tensor

from edgegossip.contract.protocol import Message
from edgegossip.net.guard.envelope import NUM_BYTES, Envelope, pack

ODD = (
    '[null, true, -1, 0, 0.5, 1e30, 9223372036854775808, "", "F32", "40", " 40", [], {},'
    ' [0, 0], [[]], {"kind": "params"}, "\\ud800"]'
)


def change_header(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    """Replace, remove, add or rename a field; all lengths are right afterwards."""
    start = NUM_BYTES + 8
    end = start + int.from_bytes(frame[NUM_BYTES:start], "little")
    try:
        header = json.loads(frame[start:end])
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        return  # it was damaged before
    _change(header, draw)
    text = json.dumps(header).encode()
    if draw.random() < 0.05:
        text = draw.choice((b"[" * 100_000, text.replace(b"{", b'{"a":1,"a":1,', 1), text[1:]))
    text = text.ljust(len(text) + -len(text) % 8)
    frame[NUM_BYTES:end] = len(text).to_bytes(8, "little") + text


def _change(tree: Any, draw: random.Random) -> None:  # noqa: ANN401
    """Change something at a random place of nested lists and dicts."""
    places = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
    if not places:
        return
    place = draw.choice(places)
    if isinstance(tree[place], dict | list) and draw.random() < 0.8:
        _change(tree[place], draw)
    elif isinstance(tree, dict) and draw.random() < 0.3:
        moved = tree.pop(place)
        if draw.random() < 0.5:
            tree[draw.choice([*SCHEMA, "indices", "", "__metadata__", "é"])] = moved
    elif type(tree[place]) is int and draw.random() < 0.7:
        tree[place] += draw.choice((-8, -4, -1, 1, 4, 8, 10**6, 2**62))
    else:
        tree[place] = draw.choice(json.loads(ODD))


DAMAGES: list[Callable[[bytearray, random.Random, list[bytes]], None]] = [
    flip_bits,
    make_extreme,
    cut_out,
    put_in,
    repeat,
    swap,
    join,
    change_header,
    change_header,
]


def mutate(sent: list[bytes], draw: random.Random) -> bytearray:
    """A damaged copy of one of `sent`; now and then it is damaged several times."""
    frame = bytearray(draw.choice(sent))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if len(frame) > NUM_BYTES + 8:
            draw.choice(DAMAGES)(frame, draw, sent)
    return frame


def forge(frame: bytearray) -> None:
    """Give `frame` a right checksum."""
    if len(frame) >= NUM_BYTES:
        fields = frame[: NUM_BYTES - 8]
        checksum = xxhash.xxh3_64_intdigest(fields + frame[NUM_BYTES:])
        frame[NUM_BYTES - 8 : NUM_BYTES] = checksum.to_bytes(8, "little")


# Lies: whole frames of messages that the schema does not describe, or nearly.


def lie(draw: random.Random) -> bytearray:
    """A frame by the package's own hand, in which something may be wrong."""
    message = draw.choice(SENT)
    kind, round, payload = message.kind, message.round, dict(message.payload)
    lives = draw.choice([(SENDER_LIFE, OWN_LIFE), (draw.randrange(2**63), OWN_LIFE)])
    envelope = [RUN, SENDER, *lives, draw.randrange(2**63)]
    match draw.randrange(6):
        case 0:
            envelope[0] = draw.choice((RUN, b"run 0002"))
            envelope[1] = draw.choice((0, 1, 2, 3, 4, 2**63 - 1))
        case 1:
            kind = draw.choice([*SCHEMA, "", "net/status", "x" * 1000])
        case 2:
            round = draw.choice((-1, 0, 40, 41, 42, 2**62, -(10**18)))
        case 3:
            payload[draw.choice(["params", "forecast", "chunk", "more"])] = PARAMS
        case 4 if payload:
            payload.pop(draw.choice([*payload]))
        case 5 if payload:
            name = draw.choice([*payload])
            payload[name] = twist(payload[name], draw)
    lying = Envelope(*envelope)  # type: ignore[arg-type]
    return bytearray().join(pack(lying, Message(kind, round, payload)))


def twist(tensor: Tensor, draw: random.Random) -> Tensor:
    """`tensor` with another dtype, shape or value."""
    tensor = tensor.clone()
    match draw.randrange(5):
        case 0:
            return tensor.to(
                draw.choice((torch.float32, torch.float64, torch.int64, torch.bool))
            )
        case 1:
            return tensor.flatten()[: draw.randrange(tensor.numel() + 1)]
        case 2:
            return tensor.flatten().repeat(draw.choice((2, 1000)))
        case 3:
            return tensor.unsqueeze(draw.choice((0, -1)))
    value = draw.choice((math.nan, math.inf, -math.inf, -1.0, 3e38, 50.0))
    is_number = tensor.is_floating_point() or math.isfinite(value)
    at = draw.randrange(tensor.numel())
    odd = torch.tensor(min(value, 2.0**15) if is_number else -1.0)
    tensor.view(-1)[at] = odd.to(tensor.dtype)
    return tensor


def make_frame(sent: list[bytes], draw: random.Random) -> tuple[bytearray, bool]:
    """A damaged, forged or lying frame, and whether its checksum was made for it."""
    chance = draw.random()
    if chance < 0.25:
        return lie(draw), True
    frame = mutate(sent, draw)
    if chance < 0.5:
        return frame, False
    forge(frame)
    return frame, True
