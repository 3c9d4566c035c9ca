"""Does a data set of twice the memory train as fast as one that fits?

    sudo python -m benchmarks.large_data [--gib 1] [--repeats 3] [--json]

A process in a memory cgroup (v1) of so many GiB trains LeNet-5 on pictures in the size of those
of CIFAR-10, uint8 in one mapped file, by `Learner` with batches of 64 in random order:

- "fits": the file has a quarter of the allowance, and all of it has been read before.
- "large": the file has twice the allowance; nothing of it is in memory at the start.

Each without reading ahead, and with one and two threads that do. Kinds take turns; a figure is
samples per second over 400 batches after the first 50, and its ratio that within a turn. The
page cache counts towards the cgroup, so pages of the large file are dropped all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.kept import about

from edgegossip.contract.protocol import Steps, Train
from edgegossip.data.dataset import WorkerData, from_numpy
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.models import lenet5
from edgegossip.training.learner import Learner, LearnerSettings
from edgegossip.training.optimizer import SGD

CGROUPS = Path("/sys/fs/cgroup/memory")
SHAPE = (3, 32, 32)
PICTURE = 3 * 32 * 32
THREADS = (0, 1, 2)
WARM_UP, MEASURED = 50, 400


@contextmanager
def memory_group(num_bytes: int) -> Iterator[Path]:
    """Make a cgroup whose processes may use so much memory, their files' pages included."""
    group = CGROUPS / f"large-data-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield group
    finally:
        group.rmdir()


def write_pictures(path: Path, num_bytes: int) -> None:
    """Write random pictures, in pieces."""
    random, piece = np.random.default_rng(0), 4096
    with path.open("wb") as file:
        for _ in range(num_bytes // (piece * PICTURE)):
            file.write(random.integers(0, 256, piece * PICTURE, np.uint8).tobytes())
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pace(path: Path, num_workers: int) -> float:
    """Train on the pictures of a file; gives samples per second.

    A file that fits is read once before.
    """
    keep_freed_memory()
    torch.set_num_threads(1)
    x = np.memmap(path, np.uint8, "r").reshape(-1, *SHAPE)
    if path.name == "fits":
        for piece in np.array_split(x, 64):
            piece.max()
    y = np.arange(len(x)) % 10
    data = from_numpy("pictures", (x, y), (x[:64], y[:64]), 10, num_workers=num_workers)
    learner = Learner(
        LearnerSettings(
            model=lenet5(SHAPE, 10),
            loss=F.cross_entropy,
            optimizer=SGD(lr=0.001),
            batch_size=64,
        ),
        WorkerData(dataset=data.training, shard=torch.arange(len(x))),
    )
    params = learner.train(Train(learner.model.params.clone(), Steps(WARM_UP))).params
    start = time.perf_counter()
    result = learner.train(Train(params, Steps(MEASURED)))
    return result.num_samples / (time.perf_counter() - start)


def measured(path: Path, num_workers: int, group: Path) -> float:
    """The same in a process of its own within the cgroup, with nothing of the file cached."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    join = f"echo $$ > {group}/cgroup.procs; exec "
    command = f"{sys.executable} -m benchmarks.large_data --pace {path} {num_workers}"
    done = subprocess.run(["sh", "-c", join + command], stdout=subprocess.PIPE, check=True)
    return float(done.stdout.decode().splitlines()[-1])


def compare(gib: float, repeats: int) -> dict[str, Any]:
    """Measure all kinds in turns; gives samples per second and ratios within turns."""
    allowance = int(gib * 2**30)
    paces: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, memory_group(allowance) as group:
        files = {"fits": Path(folder, "fits"), "large": Path(folder, "large")}
        write_pictures(files["fits"], allowance // 4)
        write_pictures(files["large"], 2 * allowance)
        for _ in range(repeats):
            for num_workers in THREADS:
                for name, path in files.items():
                    found = measured(path, num_workers, group)
                    paces.setdefault(f"{name}-{num_workers}", []).append(found)
    ratios = {
        str(k): [a / b for a, b in zip(paces[f"large-{k}"], paces[f"fits-{k}"], strict=True)]
        for k in THREADS
    }
    return {
        "samples_per_second": paces,
        "large_over_fits": ratios,
        "medians": {k: statistics.median(each) for k, each in ratios.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="the allowance")
    parser.add_argument("--repeats", type=int, default=3, help="turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pace", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pace:
        print(pace(Path(options.pace[0]), int(options.pace[1])))
        return 0
    if not os.access(CGROUPS, os.W_OK):
        print(f"needs root and cgroup v1 at {CGROUPS}")
        return 0
    origin = about(options)
    found = compare(options.gib, options.repeats)
    if options.json:
        print(json.dumps(origin | found))
        return 0
    for name, values in found["samples_per_second"].items():
        print(f"{name:8} {statistics.median(values):>8,.0f} samples/s")
    for name, ratio in found["medians"].items():
        print(f"large over fits, {name} threads ahead: {ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
