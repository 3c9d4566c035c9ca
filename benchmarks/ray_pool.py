"""The pool on Ray against the local one: the same work on as many cores, in one run.

    python -m benchmarks.ray_pool                    ratios, as one JSON object
    python -m benchmarks.ray_pool --kills 10         a node dies at a random moment, 10 seeds
    python -m benchmarks.ray_pool --memory 40        memory over so many epochs

(With --out FILE for the JSON alone: Ray tells of lost nodes on standard output.)

A cluster of two Ray nodes with one core each runs on this machine; the local pool has two
threads. Training: samples per second of LeNet-5 at batch 64 on pictures of MNIST's size, 64
workers, two epochs of gossip. Event loop: training stubbed, each worker pushes a small message
after each step; and once more while every stub is sent to the actors, however small. Runs
alternate; medians are compared. What it takes to start Ray and its actors is not in them, and
is given apart.

Kills: EpochGossip of 8 workers trains LeNet-5. While it does, all processes of the second node
are killed with SIGKILL at a moment drawn from the seed, and another node takes its place. The
final models must be those of the local pool to the last bit.

Memory: of this process, of the actors and in the object store, as the epochs go on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from benchmarks.kept import about
from benchmarks.simulator import BATCH_SIZE, Chatter, pictures
from tests.ray_clusters import RayNodes, cluster

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.contract.topology import ring
from edgegossip.integrations.ray.ray_pool import RayPool
from edgegossip.models import lenet5
from edgegossip.recipes.rehearsal import Rehearsal
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import uneven
from edgegossip.sim.pool import ComputePool, Pool
from edgegossip.sim.simulator import Simulator
from edgegossip.training.task import Task, Workload

NUM_CORES = 2


def workload(num_workers: int, num_samples: int, seed: int = 0) -> Workload:
    task = Task(
        dataset=pictures(num_samples),
        model=partial(lenet5, input_shape=(1, 28, 28), num_classes=10),
        batch_size=BATCH_SIZE,
    )
    return Workload(task, range(num_workers), seed=seed)


def simulation(pool: Pool, work: Workload, num_workers: int, num_rounds: int) -> Simulator[Any]:
    """EpochGossip on a ring, not begun."""
    return Simulator(
        EpochGossip(topology=ring(num_workers), num_rounds=num_rounds),
        uneven(num_workers),
        work.initial_params(),
        work.make_trainer,
        pool=pool,
    )


def train(pool: Pool, work: Workload, num_workers: int, num_rounds: int) -> Simulator[Any]:
    simulator = simulation(pool, work, num_workers, num_rounds)
    simulator.run()
    return simulator


def samples_per_second(pool: Pool, num_samples: int, num_workers: int = 64) -> float:
    work = workload(num_workers, num_samples)
    start = time.perf_counter()
    train(pool, work, num_workers, 2)
    return 2 * num_samples / (time.perf_counter() - start)


def events_per_second(pool: Pool, num_events: int, num_workers: int = 64) -> float:
    num_rounds = max(1, num_events // (2 * num_workers))
    simulator = Simulator(
        Chatter(ring(num_workers), num_rounds),
        uneven(num_workers),
        torch.zeros(16),
        make_stub,
        links=Links(default=Link(latency=0.003, bandwidth=1e6)),
        pool=pool,
    )
    start = time.perf_counter()
    simulator.run()
    return simulator.num_events / (time.perf_counter() - start)


def make_stub(rank: int, incarnation: int) -> Rehearsal:
    return Rehearsal(1)


def warm_up(pool: RayPool) -> None:
    """Wait until both actors run and have trained, as after the first seconds of a run."""
    while sum(seat.seconds_per_cost is not None for seat in pool.seats) < NUM_CORES:
        train(pool, workload(8, 8 * BATCH_SIZE), 8, 1)


def compared(repeats: int, measure: Callable[[Pool], float], ray: RayPool) -> dict[str, Any]:
    runs: dict[str, list[float]] = {"local": [], "ray": []}
    for _ in range(repeats):
        with ComputePool(NUM_CORES) as local:
            runs["local"].append(measure(local))
        runs["ray"].append(measure(ray))
    local_median, ray_median = (statistics.median(runs[name]) for name in ("local", "ray"))
    return {
        "local": local_median,
        "ray": ray_median,
        "ratio": ray_median / local_median,
        "ratio_of_pairs": statistics.median(
            b / a for a, b in zip(runs["local"], runs["ray"], strict=True)
        ),
        "runs": runs,
    }


def speeds(repeats: int, num_samples: int, num_events: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    training = partial(samples_per_second, num_samples=num_samples)
    events = partial(events_per_second, num_events=num_events)
    # Each run stores its data set; Ray waits for two seconds if there is no room for another.
    with cluster(1, 1, store_bytes=2 << 30) as nodes:
        start = time.perf_counter()
        with RayPool(nodes.address) as pool:
            warm_up(pool)
            start_seconds = time.perf_counter() - start
            found = {
                "start_seconds": start_seconds,
                "samples_per_second": compared(repeats, training, pool),
                "events_per_second": compared(repeats, events, pool),
            }
        with RayPool(nodes.address, min_seconds=0) as pool:
            warm_up(pool)
            found["events_per_second_all_sent"] = compared(repeats, events, pool)
    return found


# A node that dies.


def outcome(pool: Pool, seed: int, num_rounds: int = 8) -> tuple[str, float]:
    """All bits of the final models, and the seconds that they took."""
    num_workers = 8
    work = workload(num_workers, num_workers * 10 * BATCH_SIZE, seed)
    start = time.perf_counter()
    simulator = train(pool, work, num_workers, num_rounds)
    seconds = time.perf_counter() - start
    digest = hashlib.sha256()
    for state in simulator.states:
        digest.update(state.estimate.numpy().tobytes())
    return digest.hexdigest(), seconds


def kills(num_seeds: int) -> list[dict[str, Any]]:
    """Run with a node that dies, once for each seed; say what came out of it."""
    torch.set_num_threads(1)
    with cluster(1, 1) as nodes, RayPool(nodes.address) as pool:
        return [killed(nodes, pool, seed) for seed in range(num_seeds)]


def killed(nodes: RayNodes, pool: RayPool, seed: int) -> dict[str, Any]:
    with ComputePool(NUM_CORES) as local:
        expected, _ = outcome(local, seed)
    warm_up(pool)
    undisturbed, usual = outcome(pool, seed)
    seats = pool.seats
    moment = random.Random(seed).uniform(0.0, 0.8 * usual)
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(outcome, pool, seed)
        time.sleep(moment)
        was_running = not running.done()
        # Ray starts nodes in the main thread alone.
        nodes.kill(nodes.others.pop())
        nodes.add_node(1)
        found, seconds = running.result()
    return {
        "seed": seed,
        "seconds_undisturbed": usual,
        "killed_after_seconds": moment,
        "was_running": was_running,
        "num_actors_lost": sum(seat.is_lost for seat in seats),
        "seconds": seconds,
        "is_same": expected == undisturbed == found,
    }


# Memory.


def memory(num_rounds: int, num_workers: int = 64) -> dict[str, Any]:
    """Megabytes in use after each eighth of the run, behind the workers' mean round."""
    torch.set_num_threads(1)
    work = workload(num_workers, num_workers * 2 * BATCH_SIZE)
    rows: list[dict[str, float]] = []
    with cluster(1, 1) as nodes, RayPool(nodes.address) as pool:
        warm_up(pool)
        simulator = simulation(pool, work, num_workers, num_rounds)
        until, due = 0.0, 0.0
        while not simulator.run(until):
            until += 0.1
            done = statistics.mean(state.round for state in simulator.states)
            if done >= due:
                due += num_rounds / 8
                rows.append({"round": done, **in_use()})
    return {"num_workers": num_workers, "params": len(work.initial_params()), "rows": rows}


def in_use() -> dict[str, float]:
    found = [*psutil.process_iter(["name"])]
    actors = [each.memory_info().rss for each in found if "_ActorDesk" in each.name()]
    # What the object stores have ever touched: they live in the raylets' shared memory.
    stores = [each.memory_info().shared for each in found if each.name() == "raylet"]
    return {
        "driver_mb": psutil.Process().memory_info().rss / 1e6,
        "largest_actor_mb": max(actors) / 1e6,
        "most_in_object_stores_mb": sum(stores) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="runs of each kind")
    parser.add_argument("--samples", type=int, default=76_800, help="training samples")
    parser.add_argument("--events", type=int, default=60_000, help="of the event loop")
    parser.add_argument("--kills", type=int, default=0, help="seeds with a node that dies")
    parser.add_argument("--memory", type=int, default=0, help="epochs to watch it over")
    parser.add_argument("--out", type=Path, help="file for the JSON; by default it is printed")
    options = parser.parse_args()
    origin = about(options)
    logging.basicConfig(level=logging.WARNING)
    head = {
        **origin,
        "load": os.getloadavg()[0],
    }
    if options.kills:
        runs = kills(options.kills)
        same, hit = (sum(run[name] for run in runs) for name in ("is_same", "num_actors_lost"))
        found = {"num_seeds": len(runs), "num_actors_lost": hit, "num_same": same, "runs": runs}
    elif options.memory:
        found = memory(options.memory)
    else:
        found = speeds(options.repeats, options.samples, options.events)
    text = json.dumps({**head, **found}, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
