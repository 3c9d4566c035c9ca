"""Damaged and forged messages: none may crash a worker, hang it, or pass for one that was sent.

    python -m tests.fuzz           a table
    python -m tests.fuzz --json    one JSON object

Frames of six messages are changed at random: bits flipped, bytes cut out, put in, swapped or
repeated, two frames joined, numbers made extreme, fields of the header replaced. A third stays
so, the others get a right checksum, as a forger would give them. A quarter of all is whole
frames of messages in which something is wrong. Each goes to `Admission.admit`, what passes to
`Receiving.take`, as in a worker in the midst of a run, and what is behind its envelope to
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
import random
import resource
import time
from collections import Counter
from typing import Any

import torch
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
from tests.bad_frames import make_frame
from torch import Tensor

from edgegossip.contract import codec
from edgegossip.contract.protocol import Message
from edgegossip.net.guard.admission import Admission, Admitted, Refused
from edgegossip.net.guard.envelope import NUM_BYTES
from edgegossip.net.host.peers import Peers
from edgegossip.net.host.receiving import Frame, connect
from edgegossip.net.host.settings import HostSettings
from edgegossip.net.host.status import STATUS, Phase
from edgegossip.net.memory import MemoryNetwork
from edgegossip.net.runtime import FairQueue, RunClock


def admission() -> Admission:
    return Admission(run=RUN, rank=0, num_workers=NUM_WORKERS, schema=SCHEMA)


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


class Fuzzer:
    """Counts what becomes of damaged frames."""

    def __init__(self, seed: int) -> None:
        self.sent = frames()
        peers = Peers(0, NUM_WORKERS, OWN_LIFE)
        peers.has_begun, peers[SENDER].is_reachable = True, True
        self.peers, transport = peers, MemoryNetwork().transport(0)
        self.sending, self.receiving, _ = connect(
            Described(),  # type: ignore[arg-type]
            PARAMS,
            transport,
            FairQueue(),
            peers,
            HostSettings(run=RUN),
            RunClock(time.monotonic),
        )
        self.admission, self.refusals = self.receiving.admission, self.receiving._refusals
        transport.open(self.receiving, self.admission.max_bytes)
        self.sending.phase = Phase.RUNNING
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
        self.admission.strikes.forgive(SENDER)  # who would otherwise be heard no longer
        verdict = self.admission.admit(SENDER, frame, OWN_ROUND)
        if isinstance(verdict, Refused):
            self.refusals.add(verdict)
        if isinstance(verdict, Admitted):
            envelope, message = verdict.envelope, verdict.message
            is_right = is_as_described(message) if is_forged else original in self.sent
            is_right = is_right and (envelope.run, envelope.sender) == (RUN, SENDER)
            self.counts["accepted"] += 1
            if not is_right:
                self._note("wrongly_accepted", message, original)
            sender = self.peers[SENDER]
            sender.turn_to(SENDER_LIFE)
            sender.received = 0
            self.receiving.take(Frame(SENDER, memoryview(frame)), OWN_ROUND, 0.0)
            self.sending.tell(SENDER, again=True)
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
            for (_, reason), n in fuzzer.refusals.counts.most_common()
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
