"""Do honest workers learn as well beside a liar as without it?

    python -m benchmarks.liars [--seeds 0 1 2] [--only gosgd diloco] [--lies NAME...] [--json]

Four processes meet over zenoh on loopback, with certificates, and train the quickstart recipe's
model on its digits. Worker 0 lies in one way. The three others are compared with those of a run
without worker 0: absent from the start for lies about the run, killed at half of the run for
lies that begin there. Accuracy is the test accuracy of the honest three's averaged model. Where
a worker is restarted, it is killed at half of the run and started again at once, in the runs
that are compared with, too. An epoch takes a quarter of a second at least, so that there is a
half of the run.

Exits with 1 if an honest worker does not finish, or accuracy is a point below that run's.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.kept import about
from benchmarks.lie_cases import CASES, RESTARTED, Case
from tests import liars
from tests.liars import HONEST, LIAR, NUM_WORKERS, teach

from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import GoSGD
from edgegossip.algorithms.push_sum.stochastic_gradient_push import StochasticGradientPush
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.protocol import Rank, Seconds, Train
from edgegossip.contract.topology import complete
from edgegossip.contract.trainer import Trainer, TrainingResult
from edgegossip.net.address import Address
from edgegossip.net.guard.envelope import Envelope, pack
from edgegossip.net.host.host import Host
from edgegossip.net.host.settings import HostSettings
from edgegossip.net.host.status import Phase
from edgegossip.net.identity.tls import TLS
from edgegossip.net.zenoh.transport import ZenohTransport
from edgegossip.real.launch import free_ports
from edgegossip.recipes.quickstart import DEFAULTS, quickstart
from edgegossip.training.task import Workload

LIMIT: Seconds = 60.0
"""A worker that has not finished by then never will."""
ALLOWED = 0.01
RUN = b"lie test"
FLOOD_RATE = 10_000
"""Messages a second to each; a worker is muted beyond 2000."""

TOPOLOGY = complete(NUM_WORKERS)
STEPS = 22
"""Approximate number of steps in an epoch of a worker."""
EPOCHS = 20
STEP_SECONDS: Seconds = 0.25 / STEPS
"""Minimum duration of a step."""
PROCESSES = multiprocessing.get_context("fork")  # importing PyTorch again would take longest


def algorithms(seed: int) -> dict[str, Algorithm[Any]]:
    return {
        "epoch-gossip": EpochGossip(topology=TOPOLOGY, num_rounds=EPOCHS),
        "gosgd": GoSGD(
            topology=TOPOLOGY,
            num_rounds=EPOCHS * STEPS,
            exchange_probability=DEFAULTS.exchange_probability,
            seed=seed,
        ),
        "diloco": DiLoCo(topology=TOPOLOGY, num_rounds=EPOCHS, local_steps=STEPS),
        "stochastic-gradient-push": StochasticGradientPush(
            topology=TOPOLOGY, num_rounds=EPOCHS, local_steps=STEPS
        ),
    }


# A run.


def paced(trainer: Trainer) -> Trainer:
    """Let `trainer` train no faster than `STEP_SECONDS`."""
    train = trainer.train

    def train_slowly(request: Train, progress: float = 0.0) -> TrainingResult:
        began = time.monotonic()
        result = train(request, progress)
        time.sleep(max(0.0, began + result.num_steps * STEP_SECONDS - time.monotonic()))
        return result

    trainer.train = train_slowly  # type: ignore[method-assign]
    return trainer


@dataclass(frozen=True)
class Setting:
    """The values that all processes of a run know.

    Attributes:
        endpoints: Where each worker listens.
        certificates: The folder of all.
        rounds: [num_workers] how far each is, in memory that they share; no lock, which one
            that is killed could hold.
        has_flood: Whether worker 0 is to flood; likewise.
        results: Where each puts its rank, incarnation, end, refusals and estimate.
    """

    algorithm: Algorithm[Any]
    case: Case
    workload: Workload
    endpoints: tuple[str, ...]
    certificates: Path
    rounds: Any = None
    has_flood: Any = None
    results: Any = None


def work(setting: Setting, rank: Rank, incarnation: int) -> None:
    """Be a worker, in a process of its own."""
    os.dup2(2, 1)  # zenoh prints what it thinks of links on standard output
    others = tuple(each for each in setting.endpoints if each != setting.endpoints[rank])
    transport = ZenohTransport(
        run="liars",
        rank=rank,
        num_workers=NUM_WORKERS,
        address=Address(listen=(setting.endpoints[rank],), connect=others),
        security=TLS.from_folder(setting.certificates, rank),
    )
    host: Host[Any] = Host(
        setting.algorithm,
        rank,
        NUM_WORKERS,
        setting.workload.initial_params(rank),
        paced(setting.workload.make_trainer(rank, incarnation)),
        transport,
        settings=HostSettings(
            run=RUN, meet_seconds=5.0, settle_seconds=0.5, max_seconds=10 * LIMIT
        ),
    )
    if rank == LIAR:
        teach(host, lambda *said: setting.case.lie(setting.algorithm, *said))
        threading.Thread(target=flood, args=(host, setting.has_flood), daemon=True).start()
    threading.Thread(target=tell_round, args=(host, setting.rounds), daemon=True).start()
    try:
        end = host.run()
    except Exception as error:
        end = repr(error)
    estimate = host.state.estimate.tolist()
    setting.results.put((rank, incarnation, end, host.refusals, estimate))


def tell_round(host: Host[Any], rounds: Any) -> None:  # noqa: ANN401
    while True:
        rounds[host.rank] = host.state.round
        time.sleep(0.005)


def flood(host: Host[Any], has_flood: Any) -> None:  # noqa: ANN401
    """Send well-formed accounts of itself, without an end."""
    peers = host.peers
    while not has_flood.value:
        time.sleep(0.005)
    while True:
        for rank in HONEST:
            message = peers.status_for(rank, Phase.RUNNING, 1.0).message()
            frame = pack(Envelope(RUN, LIAR, peers.life, peers[rank].life, 0), message)
            for _ in range(FLOOD_RATE // 100):
                host._transport.send(rank, frame)
        time.sleep(0.01)


class Run:
    """Four processes, and what is done to them."""

    def __init__(self, algorithm: Algorithm[Any], case: Case, seed: int, folder: Path) -> None:
        task = quickstart(replace(DEFAULTS, seed=seed)).experiments["epoch-gossip"].task
        self.setting = Setting(
            algorithm,
            case,
            Workload(task, range(NUM_WORKERS), seed),
            tuple(f"tls/127.0.0.1:{port}" for port in free_ports(NUM_WORKERS)),
            folder,
            PROCESSES.RawArray("l", NUM_WORKERS),
            PROCESSES.RawValue("b", 0),
            PROCESSES.Queue(),
        )
        self.processes: dict[Rank, Any] = {}

    def start(self, rank: Rank, incarnation: int = 0) -> None:
        process = PROCESSES.Process(
            target=work, args=(self.setting, rank, incarnation), daemon=True
        )
        process.start()
        self.processes[rank] = process

    def kill(self, rank: Rank) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()

    def go(self) -> dict[str, Any]:
        began, setting = time.monotonic(), self.setting
        case, half = setting.case, (setting.algorithm.traits.num_rounds or 0) // 2
        for rank in range(1 if case.is_absent else 0, NUM_WORKERS):
            self.start(rank)
        if case.leaves or case.floods or case.restarts:
            while all(setting.rounds[rank] < half for rank in HONEST):
                time.sleep(0.005)
        if case.leaves:
            self.kill(LIAR)
        if case.restarts:
            self.kill(RESTARTED)
            self.start(RESTARTED, 1)
        if case.floods:
            setting.has_flood.value = 1
        ends = self._collect(began + LIMIT)
        seconds = time.monotonic() - began
        for rank in self.processes:
            self.kill(rank)
        estimates = [torch.tensor(ends[rank][2]) for rank in HONEST if rank in ends]
        accuracy = 0.0
        if estimates:
            _, metrics = setting.workload.evaluate(torch.stack(estimates).mean(0))
            accuracy = metrics["accuracy"]
        return {
            "ends": [ends[rank][0] if rank in ends else "hangs" for rank in HONEST],
            "rounds": [setting.rounds[rank] for rank in HONEST],
            "accuracy": accuracy,
            "seconds": seconds,
            "refused": [ends[rank][1] if rank in ends else {} for rank in HONEST],
        }

    def _collect(
        self, deadline: Seconds
    ) -> dict[Rank, tuple[str, dict[str, int], list[float]]]:
        ends: dict[Rank, tuple[str, dict[str, int], list[float]]] = {}
        with suppress(queue.Empty):
            while not ends.keys() >= {*HONEST}:
                left = max(0.0, deadline - time.monotonic())
                rank, _, *end = self.setting.results.get(timeout=left)
                ends[rank] = tuple(end)
        return ends


# All.


def measure(
    names: Sequence[str], lies: Sequence[str], seeds: Sequence[int], folder: Path
) -> list[Any]:
    rows: list[dict[str, Any]] = []
    needed = {*lies, *(CASES[lie].compared_with for lie in lies), "nobody lies"}
    if any(CASES[lie].restarts for lie in lies):
        needed.add("restart, nobody lies")
    for seed in seeds:
        for name in names:
            found: dict[str, dict[str, Any]] = {}
            for title, case in CASES.items():
                if (case.only and name not in case.only) or title not in needed:
                    continue
                row = Run(algorithms(seed)[name], case, seed, folder).go()
                found[title] = row | {"algorithm": name, "case": title, "seed": seed}
                rows.append(_judged(found, title, case))
                print(_line(rows[-1]), file=sys.stderr)
    return rows


def _judged(found: Mapping[str, dict[str, Any]], title: str, case: Case) -> dict[str, Any]:
    row = found[title]
    row["have_finished"] = set(row["ends"]) == {"finished"}
    row["is_kept"] = row["have_finished"]
    honest = "restart, nobody lies" if case.restarts else "nobody lies"
    row["points_against_nobody_lies"] = 100 * (row["accuracy"] - found[honest]["accuracy"])
    if case.compared_with is not None:
        difference = row["accuracy"] - found[case.compared_with]["accuracy"]
        row["points"] = 100 * difference
        row["is_kept"] = row["is_kept"] and difference >= -ALLOWED
    return row


def _line(row: Mapping[str, Any]) -> str:
    points = f"{row['points']:+7.2f}" if "points" in row else " " * 7
    return (
        f"{row['seed']:<3}{row['algorithm']:26}{row['case']:35}{row['have_finished']!s:6}"
        f"{row['accuracy']:8.2%}{points}{row['points_against_nobody_lies']:+7.2f}"
        f"{row['seconds']:7.1f}{'' if row['is_kept'] else '  NO'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    lies = [title for title, case in CASES.items() if case.compared_with is not None]
    names = list(algorithms(0))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--lies", nargs="+", choices=lies, default=lies)
    parser.add_argument("--json", action="store_true", help="print JSON as well")
    options = parser.parse_args()
    origin = about(options)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        liars.certificates(Path(folder))
        rows = measure(options.only, options.lies, options.seeds, Path(folder))
    if options.json:
        kept = {
            **origin,
            "seeds": options.seeds,
            "settings": {
                "num_workers": NUM_WORKERS,
                "epochs": EPOCHS,
                "steps_per_epoch": STEPS,
                "step_seconds": STEP_SECONDS,
                "allowed": ALLOWED,
            },
            "result": rows,
        }
        print(json.dumps(kept, indent=1))
    return not all(row["is_kept"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
