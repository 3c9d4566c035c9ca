"""Does a run survive what machines do to it? Workers as processes, killed, paused, cut off.

    python -m tests.soak [--minutes 10] [--json]     disturbed all the time
    python -m tests.soak --kills [--seeds 20] [--json]
                                            two of eight killed, one of them restarted
    sudo python -m tests.soak --partition [--apart 30] [--json]
                                            two halves of four, cut off from each other

The soak: at random moments a worker gets SIGKILL and is started again by the same command, or
two workers are paused with SIGSTOP, for longer than their silence is tolerated, and wake up
later: what a broken link does to all that they are connected to. Wanted: memory that does not
grow, models that agree in the end, no process left, and no line in a log that is not expected.

The kills: the same run with and without them, for each seed. Wanted: on average over the seeds
an accuracy within 0.5 percentage points (one test sample is 0.28), and that the others notice
within 3 s (twice the crew's lease) that a worker is lost: nobody who is left pauses for longer
between two pieces of training. The one that was restarted takes part again.

The partition, between hosts of the lab: what passes between the halves is lost for 30 s,
without a word to anybody. Wanted: each half goes on alone within 3 s; when the cut heals, all
exchange again within 10 s; their models agree in the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.kept import about
from tests.crew import (
    NUM_WORKERS,
    RECIPE,
    Crew,
    accuracy,
    crew,
    make_lab,
    relative_distance,
)

LONGEST_PAUSE = 6.0
MAX_DISTANCE = 0.1  # of the models at the end, relative
MAX_GROWTH = 1.0  # MB a minute, the median of the processes
BEFORE_CUT, AFTER_CUT = 10.0, 35.0


# The soak.


class Disturber:
    """Kills, restarts and pauses workers at random; knows what is to be done when.

    Args:
        workers: Whom.
        seed: Of what happens.
    """

    def __init__(self, workers: Crew, seed: int) -> None:
        self._workers = workers
        self._random = random.Random(seed)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._away: set[int] = set()
        self.counts = {"kills": 0, "pauses": 0}

    def disturb(self, now: float) -> None:
        """Kill one worker or pause two; at least half of them are left alone."""
        there = [rank for rank in range(NUM_WORKERS) if rank not in self._away]
        if len(there) <= NUM_WORKERS // 2 + 2:
            return
        if self._random.random() < 0.6:
            self._kill(self._random.choice(there), now)
        else:
            self._pause(self._random.sample(there, 2), now)

    def _kill(self, rank: int, now: float) -> None:
        self.counts["kills"] += 1
        self._workers.kill(rank)

        def restart() -> None:
            self._workers.start(rank)
            self._away.discard(rank)

        self._away.add(rank)
        self._later.append((now + self._random.uniform(0, LONGEST_PAUSE), restart))

    def _pause(self, ranks: Sequence[int], now: float) -> None:
        self.counts["pauses"] += 1
        pids = [self._workers.processes[rank].pid for rank in ranks]
        for pid in pids:
            psutil.Process(pid).send_signal(signal.SIGSTOP)

        def wake() -> None:
            for pid in pids:
                psutil.Process(pid).send_signal(signal.SIGCONT)
            self._away.difference_update(ranks)

        self._away.update(ranks)
        self._later.append((now + self._random.uniform(1, LONGEST_PAUSE), wake))

    def catch_up(self, now: float) -> None:
        """Do what is due; with infinity, all that is left."""
        for due, action in [*self._later]:
            if due <= now:
                self._later.remove((due, action))
                action()


def held(pid: int) -> float:
    """MB of its own memory and of shared memory; pages of program files are not held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {
        name: int(rest.split()[0])
        for name, _, rest in (s.partition(":") for s in lines)
        if name.startswith("Rss")
    }
    return (sizes["RssAnon"] + sizes["RssShmem"]) * 1024 / 1e6


@dataclass
class Memory:
    """Memory of each worker's process over time."""

    megabytes: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def sample(self, workers: Crew, now: float) -> None:
        for process in workers.processes.values():
            if process.poll() is None:
                self.megabytes.setdefault(process.pid, []).append((now, held(process.pid)))

    def growth(self, warm_up: float = 120.0) -> list[float]:
        """MB per minute, of each process that was watched for a minute after warming up.

        Eight that share two cores take a while to begin, and have all that they ever hold once
        checkpoints were written with all messages since those before: two minutes.
        """
        slopes = []
        for samples in self.megabytes.values():
            late = [(t, mb) for t, mb in samples if t >= samples[0][0] + warm_up]
            if late and late[-1][0] - late[0][0] >= 60:
                slopes.append(60 * statistics.linear_regression(*zip(*late, strict=True)).slope)
        return slopes


def num_strays(sessions: Collection[int]) -> int:
    """Processes of these sessions, one for each worker, that still run."""
    strays = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            is_one = os.getsid(process.pid) in sessions
            strays += is_one and process.status() != psutil.STATUS_ZOMBIE
    return strays


def soak(arguments: Sequence[str], minutes: float, seed: int) -> dict[str, Any]:
    """Disturb a run for so long, leave it alone for two minutes, and see what is left."""
    seconds, memory = 60 * minutes, Memory()
    with crew(arguments, seconds) as workers:
        started = time.monotonic()
        disturber, moments = Disturber(workers, seed), random.Random(seed)
        quiet_from, next_at = max(0.5 * seconds, seconds - 120), 5.0
        while (now := time.monotonic() - started) < quiet_from:
            disturber.catch_up(now)
            memory.sample(workers, now)
            if now >= next_at:
                disturber.disturb(now)
                next_at = now + moments.expovariate(1 / 6)
            time.sleep(0.5)
        disturber.catch_up(math.inf)
        hanging = workers.join(seconds + 60)
        strange, estimates = workers.unexplained, workers.estimates
        trained = [workers.num_trained(rank) for rank in range(NUM_WORKERS)]
        stray = num_strays({*memory.megabytes, *(p.pid for p in workers.processes.values())})
    growth = memory.growth()
    return {
        "minutes": minutes,
        **disturber.counts,
        "pieces_trained": trained,
        "workers_with_a_model": len(estimates),
        "relative_consensus_distance": relative_distance(estimates),
        "mb_per_minute_median": statistics.median(growth) if growth else None,
        "mb_per_minute_largest": max(growth, default=None),
        "largest_mb": max(mb for each in memory.megabytes.values() for _, mb in each),
        "hanging": hanging,
        "stray_processes": stray,
        "unexplained_lines": strange,
        "is_kept": (
            not (hanging or strange or stray)
            and len(estimates) == NUM_WORKERS
            and relative_distance(estimates) <= MAX_DISTANCE
            and bool(growth)  # of nothing watched long enough nothing is known
            and statistics.median(growth) <= MAX_GROWTH
        ),
    }


# The kills.


def one_run(arguments: Sequence[str], num_epochs: int, seed: int, kills: int) -> dict[str, Any]:
    """Run once; kill so many workers on the way, and restart the last of them."""
    moments = random.Random(seed)
    arguments = [*arguments, "--num-epochs", str(num_epochs), "--seed", str(seed)]
    with crew(arguments, seconds=3600) as workers:
        killed = moments.sample(range(NUM_WORKERS), kills)
        others = [rank for rank in range(NUM_WORKERS) if rank not in killed]
        when = sorted(moments.uniform(0.05, 0.3) * num_epochs for _ in killed)
        for rank, moment in zip(killed, when, strict=True):
            while workers.num_trained(others[0]) < moment:
                time.sleep(0.05)
            workers.kill(rank)
        for rank in killed[-1:]:
            time.sleep(moments.uniform(0, 1))
            workers.start(rank)
        hanging = workers.join(120)
        longest = [max(pauses(workers.events(rank, "trained"))) for rank in others]
        return {
            "accuracy": accuracy(workers.estimates.mean(0), seed),
            "longest_pause": max(longest),
            "are_back": all(workers.events(rank, "recovered") for rank in killed[-1:]),
            "hanging": hanging,
            "unexplained_lines": workers.unexplained,
        }


def pauses(trained: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds between two pieces of training: what noticing a loss takes is part of them."""
    return [after["start"] - before["time"] for before, after in pairwise(trained)]


def check_kills(arguments: Sequence[str], num_epochs: int, num_seeds: int) -> dict[str, Any]:
    """Runs with and without kills, seed by seed."""
    pairs = [
        [one_run(arguments, num_epochs, seed, kills) for kills in (0, 2)]
        for seed in range(num_seeds)
    ]
    points = [100 * (disturbed["accuracy"] - alone["accuracy"]) for alone, disturbed in pairs]
    longest = [disturbed["longest_pause"] for _, disturbed in pairs]
    are_back = [disturbed["are_back"] for _, disturbed in pairs]
    hanging = [rank for pair in pairs for each in pair for rank in each["hanging"]]
    strange = [line for pair in pairs for each in pair for line in each["unexplained_lines"]]
    return {
        "num_epochs": num_epochs,
        "accuracy": [[each["accuracy"] for each in pair] for pair in pairs],
        "percentage_points": points,
        "mean_percentage_points": statistics.mean(points),
        "longest_pause_undisturbed": [alone["longest_pause"] for alone, _ in pairs],
        "longest_pause": longest,
        "are_back": are_back,
        "hanging": hanging,
        "unexplained_lines": strange,
        "is_kept": statistics.mean(points) >= -0.5
        and max(longest) < 3
        and all(are_back)
        and not (hanging or strange),
    }


# The partition.


def check_partition(arguments: Sequence[str], apart: float) -> dict[str, Any]:
    """Cut a run in two halves for so many seconds, and see what each worker made of it."""
    halves = range(NUM_WORKERS // 2), range(NUM_WORKERS // 2, NUM_WORKERS)
    seconds = BEFORE_CUT + apart + AFTER_CUT
    with make_lab() as lab, crew(arguments, seconds, lab) as workers:
        time.sleep(BEFORE_CUT)
        lab.cut(*halves)
        time.sleep(apart)
        lab.mend()
        hanging = workers.join(seconds + 60)
        strange, estimates = workers.unexplained, workers.estimates
        seen = [time_apart(workers, rank) for rank in range(NUM_WORKERS)]
    alone = [found["seconds_without_the_others"] for found in seen]
    pauses_at_cut = [found["longest_pause_until_healed"] for found in seen]
    distance = relative_distance(estimates)
    is_healed = max(alone) < apart + 10 and distance < 0.05
    is_noticed = min(alone) > 0.5 * apart and max(pauses_at_cut) < 3
    return {
        "seconds_apart": apart,
        **{name: [found[name] for found in seen] for name in seen[0]},
        "workers_with_a_model": len(estimates),
        "relative_consensus_distance": distance,
        "hanging": hanging,
        "unexplained_lines": strange,
        "is_kept": is_healed and is_noticed and not (hanging or strange),
    }


def time_apart(workers: Crew, rank: int) -> dict[str, float]:
    """How long a worker sent nothing to the other half, and how it fared, by its log."""
    is_first = rank < NUM_WORKERS // 2
    across = [
        line["time"]
        for line in workers.events(rank, "sent")
        if any((other < NUM_WORKERS // 2) != is_first for other in line["receivers"])
    ]
    lost_at, healed_at = max(pairwise(across), key=lambda pair: pair[1] - pair[0])
    trained = workers.events(rank, "trained")
    before = [line for line in trained if line["time"] <= healed_at]
    return {
        "seconds_without_the_others": healed_at - lost_at,
        "pieces_trained_alone": sum(line["time"] >= lost_at for line in before),
        "longest_pause_until_healed": max(pauses(before)),
        "longest_pause_since": max(pauses(trained[len(before) - 1 :])),
    }


# For people and machines.


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="epoch-gossip", help="the algorithm")
    parser.add_argument("--kills", action="store_true", help="two kills instead of a soak")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--partition", action="store_true", help="a cut instead of a soak")
    parser.add_argument("--apart", type=float, default=30.0, help="seconds that the cut lasts")
    parser.add_argument("--num-epochs", type=int, default=300, help="of each run with kills")
    parser.add_argument("--seed", type=int, default=0, help="of what happens in a soak")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    origin = about(options)
    torch.set_num_threads(1)
    recipe = [RECIPE, "--only", options.only]
    endless = [*recipe, "--num-epochs", "20000"]
    if options.kills:
        found = check_kills(recipe, options.num_epochs, options.seeds)
    elif options.partition:
        found = check_partition(endless, options.apart)
    else:
        found = soak(endless, options.minutes, options.seed)
    if options.json:
        print(json.dumps({**origin, **found}, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:30}{value}")
    return not found["is_kept"]


if __name__ == "__main__":
    sys.exit(main())
