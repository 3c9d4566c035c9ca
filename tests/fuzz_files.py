"""Damaged and forged files: each is read or refused in words, soon and in little memory.

    python -m tests.fuzz_files           a table
    python -m tests.fuzz_files --json    one JSON object

In folders of `tests.foreign_files` (data sets, pictures, traces, profiles, checkpoints, folders
of runs, workers and studies) one file is changed at random. Half of the changes are to its
bytes, the others to what is within: values of JSON are replaced by odd ones, what is packed is
unpacked, changed and packed again, headers say other shapes, checkpoints get a right digest,
and chunks of PNG a right checksum.

errors: exceptions other than `EdgeGossipError`, and what takes longer than `MAX_SECONDS` of
processor time. With `--max-bytes`, also what needs more memory than that.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import io
import json
import logging
import random
import resource
import shutil
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tests.byte_mutations import cut_out, flip_bits, join, make_extreme, put_in, repeat, swap
from tests.foreign_files import TARGETS, Target

from edgegossip.contract.errors import EdgeGossipError
from edgegossip.runs import files

MAX_SECONDS = 10.0
HANGS_AFTER = 120.0
"""Seconds, after which it ends with a traceback."""
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    0.5,
    1e300,
    -1e300,
    10**11,
    2**63,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "$x_1$",
    "\x1b[2J\n",
    "../../x",
    "\ud800",
    "a" * 10_000,
    [],
    {},
    [[[]]],
    [None] * 1000,
    {"tensor": "t0"},
    {"same": 0},
    {"tuple": 1},
    {"dict": [[[], 1]]},
    {
        "dataclass": "edgegossip.contract.protocol:Steps",
        "number": 0,
        "fields": {"num_steps": "1"},
    },
    {"dataclass": 5, "number": 0, "fields": []},
]
BYTES = [flip_bits, make_extreme, cut_out, put_in, repeat, swap, join]


# What is within files.


def change_json(tree: Any, draw: random.Random) -> Any:  # noqa: ANN401
    """Change something at a random place of nested lists and dicts."""
    places = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
    if not places:
        return tree
    place = draw.choice(places)
    if isinstance(tree[place], dict | list) and draw.random() < 0.8:
        change_json(tree[place], draw)
    elif isinstance(tree, dict) and draw.random() < 0.3:
        moved = tree.pop(place)
        if draw.random() < 0.5:
            tree[draw.choice([*places, "", "__metadata__", "é", "../x", "$"])] = moved
    elif type(tree[place]) is int and draw.random() < 0.7:
        tree[place] += draw.choice((-8, -4, -1, 1, 4, 8, 10**6, 2**62))
    else:
        tree[place] = draw.choice(ODD)
    return tree


def change_text(text: bytes, draw: random.Random) -> bytes:
    """Change a JSON document, or one of JSON lines."""
    lines = text.splitlines(keepends=True) if text.count(b"\n{") else [text]
    at = draw.randrange(len(lines))
    try:
        tree = json.loads(lines[at])
    except (ValueError, RecursionError):
        return damage(text, draw)
    if not isinstance(tree, dict | list):
        return damage(text, draw)
    lines[at] = json.dumps(change_json(tree, draw)).encode() + b"\n"
    if draw.random() < 0.05:
        lines[at] = draw.choice((b"[" * 100_000, b'{"a":' * 100_000, b"\0" * 4, b"\n")) + b"\n"
    return b"".join(lines)


def change_safetensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header, whose length is right afterwards."""
    length = int.from_bytes(content[:8], "little")
    header = change_text(content[8 : 8 + length], draw)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def change_checkpoint(content: bytes, draw: random.Random) -> bytes:
    """Change what a checkpoint says, or one of its tensors, as a forger would."""
    tensors = safetensors.torch.load(content)
    if draw.random() < 0.8:
        plain = tensors["plain"].numpy().tobytes()
        for _ in range(draw.choice((1, 1, 3))):
            plain = change_text(plain, draw)
        tensors["plain"] = torch.frombuffer(bytearray(plain), dtype=torch.uint8)
    else:
        name = draw.choice([*tensors])
        changed = {
            "shape": tensors[name].flatten()[: draw.randrange(1 + tensors[name].numel())],
            "type": tensors[name].double(),
            "values": torch.full_like(tensors[name], draw.choice((0, 1, 255)) % 128),
            "dims": tensors[name][None],
        }
        tensors[name] = changed[draw.choice([*changed])].contiguous()
    return safetensors.torch.save(tensors, metadata={"digest": files._digest(tensors)})


def change_zip(content: bytes, draw: random.Random) -> bytes:
    """Change a member of an archive, which is whole afterwards."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice([*members])
    members[name] = draw.choice((damage, change_npy))(members[name], draw)
    changed = io.BytesIO()
    method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(changed, "w", method) as archive:
        for each, data in members.items():
            archive.writestr(each, data)
    return changed.getvalue()


def change_npy(content: bytes, draw: random.Random) -> bytes:
    """Change what an array says that it is."""
    kinds = ("<f8", "<f4", "<i8", "|u1", "|b1", "<c16", "|O", "<U9", "|V0", "|S0", "<M8[s]")
    shapes = ("(10**9,)", "(1000000000000,)", "()", "(0,)", "(12, 0)", "(1, 1, 1, 1)", "(-1,)")
    start, end = content.find(b"{"), content.find(b"\n")
    header = (
        f"{{'descr': '{draw.choice(kinds)}', 'fortran_order': {draw.choice((False, True))}, "
        f"'shape': {draw.choice(shapes)}, }}"
    )
    data = content[end + 1 :] + bytes(draw.choice((0, 8, 10**7)))
    if draw.random() < 0.5:
        number = draw.choice((-1, 5, 10**11, 2**63 - 1)).to_bytes(8, "little", signed=True)
        length = len(content) - end - 1
        return content[: end + 1] + (number * (1 + length // 8))[:length]
    return content[:start] + header.encode().ljust(end - start)[: end - start] + b"\n" + data


def change_gzip(content: bytes, draw: random.Random) -> bytes:
    """Change what is packed; now and then it is a bomb."""
    plain = gzip.decompress(content)
    if draw.random() < 0.1:
        plain += bytes(2**24)
    elif plain[:1] in b"[{":
        plain = change_text(plain, draw)
    else:
        plain = damage(plain, draw)
    return gzip.compress(plain, 1)


def change_png(content: bytes, draw: random.Random) -> bytes:
    """Change a chunk, whose checksum is right afterwards."""
    chunks, at = [], 8
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        chunks.append([content[at + 4 : at + 8], content[at + 8 : at + 8 + length]])
        at += 12 + length
    chosen = draw.choice(chunks)
    if chosen[0] == b"IHDR":
        changed = bytearray(chosen[1])
        changed[draw.randrange(len(changed))] = draw.randrange(256)
        chosen[1] = bytes(changed)
    else:
        chosen[1] = damage(chosen[1], draw)
    parts = [content[:8]]
    for kind, data in chunks:
        checksum = zlib.crc32(kind + data).to_bytes(4, "big")
        parts.append(len(data).to_bytes(4, "big") + kind + data + checksum)
    return b"".join(parts)


WITHIN: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": change_text,
    ".jsonl": change_text,
    ".npz": change_zip,
    ".gz": change_gzip,
    ".safetensors": change_safetensors,
    ".png": change_png,
}


def damage(content: bytes, draw: random.Random) -> bytes:
    """Change bytes, wherever they are."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if len(changed) > 8:
            draw.choice(BYTES)(changed, draw, [content])
    return bytes(changed)


def spoil(path: Path, draw: random.Random) -> None:
    """Damage, forge, empty or remove one file."""
    content, chance = path.read_bytes(), draw.random()
    if chance < 0.02:
        path.unlink()
        if draw.random() < 0.5:
            path.mkdir()
        return
    if chance < 0.04:
        changed = draw.choice((b"", b"\0" * len(content), content[: len(content) // 2]))
    elif chance < 0.5 or path.suffix not in WITHIN:
        changed = damage(content, draw)
    elif path.name == "checkpoint.safetensors":
        changed = change_checkpoint(content, draw)
    else:
        changed = WITHIN[path.suffix](content, draw)
    path.write_bytes(changed)


# The measurement.


class Fuzzer:
    """Counts what becomes of damaged files.

    Args:
        folder: For whole files, and for damaged copies.
        seed: Of all draws.
        names: Of the targets; all by default.
    """

    def __init__(self, folder: Path, seed: int, names: list[str] | None = None) -> None:
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.silent = 0
        self.slowest: dict[str, float] = {}
        self.examples: list[str] = []
        self._folder = folder
        self._names = names or [*TARGETS]
        for name in self._names:
            (folder / "whole" / name).mkdir(parents=True)
            TARGETS[name].make(folder / "whole" / name)

    def run(self, num_files: int) -> None:
        shares = [TARGETS[name].share for name in self._names]
        for name in self.draw.choices(self._names, shares, k=num_files):
            faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
            self._try(name, TARGETS[name])
        faulthandler.cancel_dump_traceback_later()

    def _try(self, name: str, target: Target) -> None:
        copy = self._folder / "damaged"
        shutil.copytree(self._folder / "whole" / name, copy)
        found = sorted({path for each in target.files for path in copy.glob(each)})
        path = self.draw.choice([each for each in found if each.is_file()])
        spoil(path, self.draw)
        kept = path.read_bytes() if path.is_file() else b""
        start = time.thread_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of letters that a font lacks
                target.read(copy)
            self.read[name] += 1
        except EdgeGossipError as error:
            self.refused[name] += 1
            self.silent += not str(error)
        except Exception as error:  # that there is none is the point
            self._note(name, path.relative_to(copy), error, kept)
        seconds = time.thread_time() - start
        if seconds > MAX_SECONDS:
            self._note(name, path.relative_to(copy), TimeoutError(f"{seconds:.1f} s"), kept)
        self.slowest[name] = max(seconds, self.slowest.get(name, 0.0))
        shutil.rmtree(copy)

    def _note(self, name: str, path: Path, error: Exception, content: bytes) -> None:
        self.counts["errors"] += 1
        where = traceback.extract_tb(error.__traceback__)[-1:]
        place = where[0].filename.rpartition("/")[2] + f":{where[0].lineno}" if where else ""
        if len(self.examples) < 40:
            self.examples.append(f"{name}/{path}: {error!r:.200} at {place}: {content[:60]!r}")


def measure(num_files: int, seed: int, names: list[str] | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), seed, names)
        fuzzer.run(min(100, num_files))  # so that what is allocated once is not counted
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        fuzzer.run(num_files - min(100, num_files))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "num_files": num_files,
        "seed": seed,
        "errors": fuzzer.counts["errors"] + fuzzer.silent,
        "read": dict(fuzzer.read),
        "refused": dict(fuzzer.refused),
        "slowest_cpu_seconds": fuzzer.slowest,
        "seconds": time.perf_counter() - start,
        "peak_bytes": 1024 * peak,
        "grown_bytes": 1024 * (peak - before),
        "examples": fuzzer.examples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--num-files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-bytes", type=int, help="address space of the process")
    parser.add_argument("--only", nargs="*", choices=[*TARGETS])
    arguments = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    if arguments.max_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (arguments.max_bytes,) * 2)
    result = measure(arguments.num_files, arguments.seed, arguments.only)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            lines = value if isinstance(value, list) else [value]
            print(f"{name.replace('_', ' '):>20}  " + "\n".join(map(str, lines)))
    if result["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
