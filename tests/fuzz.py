"""Damaged and forged messages: none may crash a worker, hang it, or pass for one that was sent.

    python -m tests.fuzz           a table
    python -m tests.fuzz --json    one JSON object

Frames of six messages are changed at random: bits flipped, bytes cut out, put in, swapped or
repeated, two frames joined, numbers made extreme, fields of the header replaced. A third stays
so, the others get a right checksum, as a forger would give them. A quarter of all is whole
frames of messages in which something is wrong. Each goes to `Admission.admit`, what passes to
`Post.take`, as in a worker in the midst of a run, and what is behind its envelope to
`codec.decode`.

errors: exceptions other than the `ValueError` that `decode` promises.
wrongly accepted: of those with their old checksum, what is not byte for byte a frame that was
sent; of the forged, what the schema does not describe.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import queue
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from benchmarks.corpus import (
    NUM_WORKERS,
    OWN_LIFE,
    OWN_ROUND,
    PARAMS,
    RUN,
    SCHEMA,
    SENDER,
    SENDER_LIFE,
    SENT,
    Described,
    frames,
)
from torch import Tensor

from edgegossip.core import codec
from edgegossip.core.protocol import Message
from edgegossip.net.admission import Admission
from edgegossip.net.envelope import NUM_BYTES, Envelope, pack
from edgegossip.net.host_settings import HostSettings
from edgegossip.net.items import Frame
from edgegossip.net.memory import MemoryNetwork
from edgegossip.net.peers import Peers
from edgegossip.net.post import Post
from edgegossip.net.status import STATUS, Phase


def admission() -> Admission:
    return Admission(run=RUN, rank=0, num_workers=NUM_WORKERS, schema=SCHEMA)


# Damage.

EXTREMES = [0, 1, 2**31, 2**63 - 1, 2**64 - 1, 0x7FF8 << 48, 0x7FF0 << 48, 0x7F800000]
ODD = (
    '[null, true, -1, 0, 0.5, 1e30, 9223372036854775808, "", "F32", "40", " 40", [], {},'
    ' [0, 0], [[]], {"kind": "params"}, "\\ud800"]'
)


def flip_bits(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    for _ in range(draw.choice((1, 1, 2, 9))):
        frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)


def make_extreme(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    at = draw.randrange(0, len(frame) - 7, draw.choice((1, 8)))
    frame[at : at + 8] = draw.choice(EXTREMES).to_bytes(8, "little")


def cut_out(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    begin, end = _range(frame, draw)
    del frame[begin:end]


def put_in(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    at = draw.randrange(len(frame) + 1)
    frame[at:at] = draw.randbytes(draw.choice((1, 8, 100)))


def repeat(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    begin, end = _range(frame, draw)
    frame[end:end] = frame[begin:end]


def swap(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    length = draw.choice((1, 4, 8, 64))
    if len(frame) > 2 * length:
        a, b = (draw.randrange(0, len(frame) - length + 1) for _ in range(2))
        frame[a : a + length], frame[b : b + length] = (
            frame[b : b + length],
            frame[a : a + length],
        )


def join(frame: bytearray, draw: random.Random, others: list[bytes]) -> None:
    other = draw.choice(others)
    frame[draw.randrange(len(frame) + 1) :] = other[draw.randrange(len(other) + 1) :]


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


def _range(frame: bytearray, draw: random.Random) -> tuple[int, int]:
    begin = draw.randrange(len(frame))
    return begin, min(len(frame), begin + draw.choice((1, 4, 8, 50, len(frame))))


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


# Judgement, by other means than the package's.


def is_as_described(message: Message) -> bool:
    """Whether `message` could have been sent, but for its values and for parts left out."""
    same_kind = [sent for sent in SENT if sent.kind == message.kind]
    limit = 41 if message.kind == "params" else math.inf
    return 0 <= message.round <= limit and any(_is_like(message, sent) for sent in same_kind)


def _is_like(message: Message, sent: Message) -> bool:
    is_told = message.kind == "told"  # by whomever
    if not is_told and message.payload.keys() != sent.payload.keys():
        return False
    for name, tensor in message.payload.items():
        if is_told and name not in {"1.x", "2.x", "3.x"}:
            return False
        expected = sent.payload["2.x" if is_told else name]
        has_shape = tensor.shape == expected.shape or (
            name == "chunk" and tensor.dim() == 1 and tensor.numel() <= 17
        )
        if tensor.dtype != expected.dtype or not has_shape or not tensor.isfinite().all():
            return False
        if name in ("weight", "forecast", "indices") and (tensor < 0).any():
            return False
        if name == "indices" and (tensor > 49).any():
            return False
        if message.kind == STATUS and not is_of_a_status(name, tensor):
            return False
    return True


def is_of_a_status(name: str, value: Tensor) -> bool:
    most = {"phase": 3.0, "elapsed": 1e9}.get(name, math.inf)
    return bool((value >= (name == "life")).all() and (value <= most).all())


# The measurement.


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


class Fuzzer:
    """Counts what becomes of damaged frames."""

    def __init__(self, seed: int) -> None:
        self.sent = frames()
        peers = Peers(0, NUM_WORKERS, OWN_LIFE)
        peers.has_begun, peers[SENDER].is_reachable = True, True
        self.post = Post(
            Described(),  # type: ignore[arg-type]
            PARAMS,
            MemoryNetwork().transport(0),
            queue.SimpleQueue(),
            peers,
            HostSettings(run=RUN),
        )
        self.post.open()
        self.post.phase = Phase.RUNNING
        self.admission = self.post.admission
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        self.slowest = 0.0

    def run(self, num_messages: int) -> None:
        for _ in range(num_messages):
            frame, is_forged = make_frame(self.sent, self.draw)
            original = bytes(frame)
            start = time.thread_time()
            try:
                self._judge(frame, original, is_forged)
            except Exception as error:  # that there is none is the point
                self._note("errors", error, original)
            self.slowest = max(self.slowest, time.thread_time() - start)

    def _judge(self, frame: bytearray, original: bytes, is_forged: bool) -> None:
        admitted = self.admission.admit(SENDER, frame, OWN_ROUND)
        if admitted is not None:
            envelope, message = admitted
            is_right = is_as_described(message) if is_forged else original in self.sent
            is_right = is_right and (envelope.run, envelope.sender) == (RUN, SENDER)
            self.counts["accepted"] += 1
            if not is_right:
                self._note("wrongly_accepted", message, original)
            sender = self.post.peers[SENDER]
            self.post._strikes.forgive(SENDER)  # who would otherwise be heard no longer
            sender.turn_to(SENDER_LIFE)
            sender.received = 0
            self.post.take(Frame(SENDER, memoryview(frame)), OWN_ROUND, 0.0)
            self.post.tell(SENDER, again=True)
        try:
            codec.decode(memoryview(frame)[NUM_BYTES:])
            self.counts["decoded"] += 1
        except ValueError:
            self.counts["not_decoded"] += 1

    def _note(self, what: str, example: object, frame: bytes) -> None:
        self.counts[what] += 1
        if len(self.examples) < 5:
            self.examples.append(f"{what}: {example!r}: {frame.hex()}")


def measure(num_messages: int, seed: int) -> dict[str, Any]:
    fuzzer = Fuzzer(seed)
    fuzzer.run(min(1000, num_messages))  # so that what is allocated once is not counted
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    fuzzer.run(num_messages - min(1000, num_messages))
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    counts = fuzzer.counts
    return {
        "num_messages": num_messages,
        "seed": seed,
        "errors": counts["errors"],
        "wrongly_accepted": counts["wrongly_accepted"],
        "accepted": counts["accepted"],
        "decoded": counts["decoded"],
        "dropped": {
            reason: n
            for (_, reason), n in fuzzer.admission.dropped.most_common()
            if reason != "missing"  # whatever number a forger makes up
        },
        "slowest_cpu_seconds": fuzzer.slowest,
        "seconds": seconds,
        "grown_bytes": 1024 * grown,
        "examples": fuzzer.examples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--num-messages", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("edgegossip.net").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    result = measure(arguments.num_messages, arguments.seed)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name.replace('_', ' '):>20}  {value}")
    if result["errors"] or result["wrongly_accepted"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
