"""Do real workers train over thin and bad links, with default settings?

    sudo python -m benchmarks.thin_links --trace lte.npz:NAME_up:NAME_down [--json]

Three workers train the embedded digits, each on a host of the lab, behind a cable that

- `thin`: carries 64 kbit/s each way, with a round trip of 600 ms to each other worker;
- `lossy`: carries 1 Mbit/s with 50 ms, and loses 5 % of all frames, each way;
- `rare`: carries 1 Mbit/s with 50 ms, but only for ten seconds of each minute; here all
  algorithms train for six minutes, because the others' runs are over before the first one is;
- `lte`: follows a trace, with 50 ms. FILE.npz:UP:DOWN names two series of packets of 1500 bytes
  per 100 ms. Each worker begins at another place in it.

All frames pass `lab/relay.py`, which drops and delays them, so TCP sends again as it does on a
real link. A rate queues for half a second, or 16 kB. The model has an MLP's 154 kB.

Columns: whether all workers ended by themselves within `--limit` seconds, with exit code 0; how
far apart their final models are (largest distance to the mean, over its norm); messages that
never arrived; bytes that the busiest of the workers sent, over what its cable could carry, in
the seconds in which messages waited in it; the largest number of bytes that waited in a worker,
over those of its model (sampled each 0.1 s); and how often links were lost while workers
trained.

Set PYTHONPATH to the sources that are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.kept import about, rounded
from lab.lab import HostSpec, Lab
from lab.relay import SLOT, Shape
from safetensors.numpy import load_file

import edgegossip as eg
from edgegossip.cli.main import main as edgegossip

NUM_WORKERS = 3
MODEL_BYTES = 4 * (64 * 512 + 512 + 512 * 10 + 10)
SECONDS = 60.0
"""Training of algorithms that do not count rounds."""
LONG = 6 * SECONDS
"""The same on links that are up for a sixth of the time."""
METRICS = 9100
_EVERY = 0.1
_PACKET = 1500
_APART = 300
"""Slots between the places in a trace at which two workers begin."""


def recipe(algorithm: str = "epoch-gossip", seconds: float | None = None) -> eg.Experiment:
    """An algorithm, for so long or, by default, five rounds or a minute.

    All settings of the network are the defaults.
    """
    graph = eg.complete(NUM_WORKERS)
    rounds = 5 if seconds is None else eg.UNTIL_CUT_OFF
    if seconds is None and algorithm in ("gosgd", "adsp"):
        seconds = SECONDS
    limit = seconds or SECONDS
    gossip = eg.EpochGossip(topology=graph, num_rounds=rounds)
    algorithms: dict[str, Any] = {
        "epoch-gossip": gossip,
        "edge-gossip": eg.EdgeGossip(inner=gossip),
        "diloco": eg.DiLoCo(topology=graph, num_rounds=rounds, local_steps=20),
        "gosgd": eg.GoSGD(topology=graph, num_rounds=eg.UNTIL_CUT_OFF),
        "adsp": eg.ADSP(
            num_workers=NUM_WORKERS - 1,
            num_rounds=eg.UNTIL_CUT_OFF,
            window=limit / 4,
            min_interval=limit / 40,
        ),
    }
    model = partial(eg.mlp, input_shape=(1, 8, 8), num_classes=10, hidden=(512,))
    return eg.Experiment(
        task=eg.Task(dataset=eg.hold_out(eg.digits()), model=model, batch_size=16),
        algorithm=algorithms[algorithm],
        platforms=(eg.Platform(throughput=1000.0),) * NUM_WORKERS,
        max_seconds=seconds,
        name=algorithm,
    )


ALGORITHMS = ("epoch-gossip", "edge-gossip", "diloco", "gosgd", "adsp")


def slots(megabits: float) -> tuple[int, ...]:
    """A constant rate."""
    return (round(megabits * 1e6 / 8 * SLOT),)


def shapes(link: str, trace: str | None) -> list[Shape]:
    """The cable of each worker."""
    if link == "thin":
        return [Shape(latency=0.15, out=slots(0.064), back=slots(0.064))] * NUM_WORKERS
    near = Shape(latency=0.0125, out=slots(1), back=slots(1))
    if link == "lossy":
        # Two cables lie between two workers, and a frame is lost on one of them.
        return [replace(near, loss=1 - 0.95**0.5)] * NUM_WORKERS
    if link == "rare":
        return [replace(near, up=10.0, period=60.0)] * NUM_WORKERS
    if trace is None:
        raise SystemExit("lte needs --trace FILE.npz:UP:DOWN")
    file, up, down = trace.split(":")
    series = np.load(file)
    ways = [series[name].astype(int) * _PACKET for name in (up, down)]
    turned = [
        [np.roll(way, -rank * 300).tolist() for way in ways] for rank in range(NUM_WORKERS)
    ]
    return [replace(near, out=tuple(out), back=tuple(back)) for out, back in turned]


LINKS = ("thin", "lossy", "rare", "lte")


# Within a host.


def work(arguments: list[str], out: Path) -> int:
    """Be a worker, and note what waits in it."""
    threading.Thread(target=_sample, args=(out,), daemon=True).start()
    return edgegossip(arguments)


def _sample(out: Path) -> None:
    while True:
        with suppress(OSError), out.open("a") as file:
            with urllib.request.urlopen(f"http://127.0.0.1:{METRICS}/metrics") as answer:
                text = answer.read().decode()
            found = re.findall(r"^edgegossip_send_queue_bytes\{.*\} (\S+)$", text, re.MULTILINE)
            print(json.dumps([time.time(), sum(map(float, found))]), file=file)
        time.sleep(_EVERY)


# Outside.


@dataclass(kw_only=True)
class Cell:
    """A running lab, where its workers write, and what its cables have carried by when."""

    link: str
    algorithm: str
    lab: Lab
    cables: list[Shape]
    folder: Path
    began: float
    workers: list[Any] = field(default_factory=list)
    traffic: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether all workers have ended."""
        return all(worker.poll() is not None for worker in self.workers)

    def look(self) -> None:
        """Note what the hosts have sent so far."""
        sent = [self.lab.traffic(rank)[0] for rank in range(NUM_WORKERS)]
        self.traffic.append((time.time(), sent))


def begin(link: str, algorithm: str, trace: str | None, folder: Path, stack: ExitStack) -> Cell:
    """Start the workers of one run."""
    cables = shapes(link, trace)
    lab = stack.enter_context(Lab([HostSpec(shape=shape) for shape in cables]))
    cell = Cell(
        link=link,
        algorithm=algorithm,
        lab=lab,
        cables=cables,
        folder=folder,
        began=time.time(),
    )
    endpoints = [f"tcp/{address}:7447" for address in lab.addresses]
    for rank in range(NUM_WORKERS):
        others = [*endpoints[:rank], *endpoints[rank + 1 :]]
        words = ["worker", f"{__file__}:recipe", "--algorithm", algorithm, "--rank", str(rank)]
        words += ["--seconds", str(LONG)] if link == "rare" else []
        words += ["--insecure", "--listen", endpoints[rank], "--metrics", str(METRICS)]
        words += ["--connect", *others]
        words += ["--out", str(folder / str(rank)), "--parent", str(os.getpid())]
        me = [sys.executable, "-m", "benchmarks.thin_links", "--worker"]
        output = stack.enter_context((folder / f"{rank}.txt").open("wb"))
        command = [*me, str(folder / f"{rank}.jsonl"), *words]
        cell.workers.append(lab.start(rank, command, output=output))
    return cell


def watch(cell: Cell, limit: float) -> None:
    """Wait for a run, at most `limit` seconds."""
    while not cell.is_over and time.time() < cell.began + limit:
        cell.look()
        time.sleep(0.5)


def row(cell: Cell) -> dict[str, Any]:
    """The figures of one run."""
    ranks = range(NUM_WORKERS)
    codes = [worker.poll() for worker in cell.workers]
    logs = [(cell.folder / f"{rank}.txt").read_text() for rank in ranks]
    summaries = [_read(cell.folder / str(rank) / "summary.json") for rank in ranks]
    paths = [cell.folder / f"{rank}.jsonl" for rank in ranks]
    samples = [[*map(json.loads, path.read_text().splitlines())] for path in paths]
    refused = [number_of for each in summaries if each for number_of in each["refused"].items()]
    peaks = [max((waiting for _, waiting in each), default=0.0) for each in samples]
    lost = [len(re.findall(r"is lost \(it has failed", log)) for log in logs]
    more = [int(number) for log in logs for number in re.findall(r"; also (\d+) times", log)]
    return {
        "link": cell.link,
        "algorithm": cell.algorithm,
        "codes": codes,
        "is_finished": codes == [0] * NUM_WORKERS,
        "apart": apart(cell.folder) if all(summaries) else None,
        "rounds": [each and each["rounds"] for each in summaries],
        "num_lost": sum(number for what, number in refused if "missing" in what),
        "used": used(cell, samples),
        "peak_models": max(peaks) / MODEL_BYTES,
        "relinks": sum(lost) + sum(more),
        "seconds": cell.traffic[-1][0] - cell.began,
    }


def _read(path: Path) -> Any:  # noqa: ANN401
    return json.loads(path.read_text()) if path.exists() else None


def apart(folder: Path) -> float:
    """The largest distance of a final model to their mean, over the mean's norm."""
    paths = [folder / str(rank) / "params.safetensors" for rank in range(NUM_WORKERS)]
    models = np.stack([load_file(path)["params"] for path in paths])
    mean = models.mean(0)
    return float(np.linalg.norm(models - mean, axis=1).max() / np.linalg.norm(mean))


def used(cell: Cell, samples: list[Any]) -> float | None:
    """Share of what the busiest direction carried of all that it could; see above."""
    shares = []
    for rank in range(NUM_WORKERS):
        busy = {round(at) for at, waiting in samples[rank] if waiting > 0}  # whole seconds
        carried = could = 0.0
        for (before, old), (after, new) in itertools.pairwise(cell.traffic):
            if round(after) in busy:
                carried += new[rank] - old[rank]
                could += capacity(cell.cables[rank], before - cell.began, after - cell.began)
        if could and len(busy) > 5:
            shares.append(carried / could)
    return max(shares, default=None)


def capacity(shape: Shape, since: float, until: float) -> float:
    """Bytes that a host can send between two times since its cable was made."""
    number = 0.0
    for slot in range(int(since / SLOT), int(until / SLOT)):
        is_up = slot * SLOT % shape.period < shape.up
        number += shape.out[slot % len(shape.out)] * is_up
    return number * (1 - shape.loss) ** 2


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        return work(sys.argv[3:], Path(sys.argv[2]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--trace", help="FILE.npz:UP:DOWN, for lte")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds of a run")
    parser.add_argument("--keep", type=Path, help="keep the folders here")
    parser.add_argument("--json", action="store_true", help="print JSON as well")
    options = parser.parse_args()
    origin = about(options)
    rows = []
    for link in options.links:  # one kind of link at a time: all algorithms share this machine
        with ExitStack() as stack:
            folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cells, watches = [], []
            for algorithm in options.only:
                path = folder / link / algorithm
                path.mkdir(parents=True)
                cells.append(begin(link, algorithm, options.trace, path, stack))
                # At once: a run may be over before the last one begins.
                watches.append(threading.Thread(target=watch, args=(cells[-1], options.limit)))
                watches[-1].start()
            for each in watches:
                each.join()
            for cell in cells:
                rows.append(row(cell))
                print(json.dumps(rounded(rows[-1])), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(rounded({**origin, "result": rows}), indent=1))
    return not all(each["is_finished"] for each in rows)


if __name__ == "__main__":
    sys.exit(main())
