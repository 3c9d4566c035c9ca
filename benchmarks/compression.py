"""How fast compressors are, how many bytes they send, and what gets lost.

    python -m benchmarks.compression                     10,000,000 normally distributed entries
    python -m benchmarks.compression --numel 1000000     fewer
    python -m benchmarks.compression --json              one JSON object

Milliseconds are processor time on one thread, medians after a warm-up: other work on the
machine disturbs it less than the clock. Encoding includes the choice of what is kept. "Lost" is
the squared error over the squared norm of what is kept. Besides normally distributed entries,
whose largest stand anywhere, there is the way that LeNet-5 has gone in 200 steps on MNIST (on
blobs if the folder $EDGEGOSSIP_DATA has none): the largest of a real model stand together.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.kept import about
from torch import Tensor

from edgegossip.compression.compressor import Compressor, Floats, Identity, PerLayer
from edgegossip.compression.packing import Positions, pack_positions
from edgegossip.compression.sparse import RandomK, TopK, largest
from edgegossip.compression.values import BFloat16, Quantize, Sign
from edgegossip.contract import codec
from edgegossip.contract.errors import DataError
from edgegossip.contract.protocol import Message
from edgegossip.data.readers import DATASETS
from edgegossip.models import lenet5

RATIO = 0.01
COMPRESSORS: dict[str, Compressor] = {
    "top 1 %, 4 bits": TopK(RATIO, Quantize(bits=4)),
    "top 1 %, 8 bits": TopK(RATIO, Quantize(bits=8)),
    "top 1 %, 16 bits": TopK(RATIO, BFloat16()),
    "top 1 %, 32 bits": TopK(RATIO, Identity()),
    "random 1 %, 4 bits": RandomK(RATIO, Quantize(bits=4)),
    "sign": Sign(),
    "quantize, 4 bits": Quantize(bits=4),
    "quantize, 8 bits": Quantize(bits=8),
}
Bits = dict[str, float]


def normal(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def way_of_a_model(num_steps: int = 200) -> tuple[str, Tensor, tuple[int, ...]]:
    """Data that LeNet-5 was trained on, where it has gone, and the sizes of its layers."""
    torch.manual_seed(0)
    try:
        train = DATASETS["mnist"](Path(os.environ.get("EDGEGOSSIP_DATA", "data"))).train
        name, (x, y) = "mnist", train.batch(torch.arange(6400))
        x = x.reshape(-1, 1, 28, 28).float() / 255
    except DataError:
        name, y = "blobs", torch.arange(6400) % 10
        x = (torch.randn(10, 1, 28, 28)[y] + torch.randn(6400, 1, 28, 28)).relu()
    model = lenet5(input_shape=(1, 28, 28), num_classes=10)
    params = list(model.parameters())
    before = torch.nn.utils.parameters_to_vector(params).detach().clone()
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    for batch in torch.arange(32 * num_steps).split(32):  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = torch.nn.utils.parameters_to_vector(params).detach()
    return name, after - before, tuple(p.numel() for p in params)


def milliseconds(work: Callable[[], object], num_repeats: int) -> float:
    """Median processor time of `work`, after a warm-up."""
    work()
    runs = []
    for _ in range(num_repeats):
        start = time.process_time()
        work()
        runs.append(1e3 * (time.process_time() - start))
    return statistics.median(runs)


def measure(compressor: Compressor, x: Tensor, num_repeats: int) -> dict[str, float]:
    """Figures of one compressor."""
    payload = compressor.compress(x, 0)
    sent = compressor.decompress(payload, len(x))
    is_kept = sent != 0
    num_bytes = codec.num_bytes(Message("mass", 100, payload))
    return {
        "encode_ms": milliseconds(lambda: compressor.compress(x, 0), num_repeats),
        "decode_ms": milliseconds(lambda: compressor.decompress(payload, len(x)), num_repeats),
        "bytes_per_kept_entry": num_bytes / int(is_kept.sum()),
        "times_smaller": 4 * len(x) / num_bytes,
        "lost": float((sent - x)[is_kept].square().sum() / x[is_kept].square().sum()),
    }


# Positions: bits of each.


def position_bits(positions: Positions, numel: int) -> Bits:
    """Bits that codes take for a position; "information" if all subsets were equally likely."""
    count = len(positions)
    share, gaps = count / numel, np.diff(positions, prepend=-1) - 1
    information = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    low = math.floor(math.log2(1 / share))
    return {
        "information": information / share,
        "gaps, Rice, a width for 16": len(pack_positions(positions, numel)) * 8 / count,
        "gaps, Rice, one width": min(w + 1 + float((gaps >> w).mean()) for w in range(32)),
        "Elias-Fano": low + 1 + (numel >> low) / count,
        "gaps, one width": math.ceil(math.log2(int(gaps.max()) + 1)),
        "bitmap": numel / count,
    }


# Values: what gets lost with as many bits.


def uniform(x: Floats, least: float, num_levels: int) -> Floats:
    """Nearest of equidistant magnitudes from `least` to the largest."""
    step = (float(np.abs(x).max()) - least) / (num_levels - 1)
    levels = least + step * np.round((np.abs(x) - least) / step)
    return np.copysign(levels, x).astype(np.float32)


def drawn(x: Floats, num_levels: int) -> Floats:
    """QSGD with the largest magnitude as norm: one of the two next levels, drawn."""
    step = np.abs(x).max() / (num_levels - 1)
    draws = np.random.default_rng(0).random(len(x), np.float32)
    levels: Floats = step * np.floor(np.abs(x) / step + draws)
    return np.copysign(levels, x)


def logarithmic(x: Floats, num_levels: int) -> Floats:
    """Nearest of magnitudes from the least to the largest with equal ratios."""
    logs: Floats = np.log(np.maximum(np.abs(x), 1e-4 * np.abs(x).max()))
    levels: Floats = np.exp(uniform(logs - logs.min(), 0.0, num_levels) + logs.min())
    return np.copysign(levels, x)


def lost(x: Floats, bits: int) -> Bits:
    """Squared error over squared norm, of each code."""
    num_levels, fitted = 2 ** (bits - 1), Quantize(bits=bits)
    parts = (len(x),)
    codes = {
        "fitted levels": fitted.unpack(fitted.pack(x, parts), parts),
        "equidistant from the least": uniform(x, float(np.abs(x).min()), num_levels),
        "equidistant from 0": uniform(x, 0.0, num_levels),
        "equal ratios": logarithmic(x, num_levels),
        "drawn (QSGD)": drawn(x, num_levels),
    }
    norm = np.square(x).sum()
    return {name: float(np.square(y - x).sum() / norm) for name, y in codes.items()}


def figures(numel: int, num_repeats: int) -> dict[str, Any]:
    data, way, sizes = way_of_a_model()
    x = normal(numel)
    vectors = {"normal": x.numpy(), f"LeNet-5 on {data}": way.numpy()}
    kept = {
        name: {r: largest(y, round(r * len(y))) for r in (0.1, RATIO, 0.001)}
        for name, y in vectors.items()
    }
    lists: dict[str, Any] = {
        "compressors": {n: measure(c, x, num_repeats) for n, c in COMPRESSORS.items()},
        "model": {
            f"{values}, {where}": measure(
                TopK(RATIO, made) if where == "whole" else PerLayer(TopK(RATIO, made), sizes),
                way,
                num_repeats,
            )
            for values, made in (("4 bits", Quantize(bits=4)), ("32 bits", Identity()))
            for where in ("whole", "per layer")
        },
        "position_bits": {
            f"{name}, {100 * r:g} %": position_bits(places, len(vectors[name]))
            for name in vectors
            for r, places in kept[name].items()
        },
        "lost_with_4_bits": {
            "normal, all": lost(vectors["normal"][:1_000_000], 4),
            **{
                f"{name}, top 1 %": lost(y[kept[name][RATIO]], 4) for name, y in vectors.items()
            },
        },
    }
    best = lists["compressors"]["top 1 %, 4 bits"]
    keys = ("encode_ms", "decode_ms", "bytes_per_kept_entry")
    return {"numel": numel} | {key: best[key] for key in keys} | lists


def show(rows: dict[str, dict[str, float]]) -> None:
    columns = list(next(iter(rows.values())))
    print(f"{'':26}" + "".join(f"{name:>28}" for name in columns))
    for name, row in rows.items():
        print(f"{name:26}" + "".join(f"{value:28.5g}" for value in row.values()))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--numel", type=int, default=10_000_000, help="entries of the vector")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each")
    options = parser.parse_args()
    origin = about(options)
    torch.set_num_threads(1)
    found = figures(options.numel, options.repeats)
    if options.json:
        print(json.dumps(origin | found))
        return
    print(f"{options.numel:,} entries, {options.repeats} runs\n")
    for name in ("compressors", "model", "position_bits", "lost_with_4_bits"):
        print(name.replace("_", " "))
        show(found[name])


if __name__ == "__main__":
    main()
