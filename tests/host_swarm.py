"""Worlds for real hosts in virtual time, and what must hold in each.

    python -m tests.host_swarm [--kind peers] [--worlds 10000] [--first 0] [--json]

Each seed draws an algorithm, workers of unequal speed, a network, and what goes wrong:
processes that start late, are paused, killed, restarted; cuts of one or both ways; frames that
are late, lost or come twice; full disks; stops of all; one that lies. `check` runs it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from tests.host_checks import (
    check,
    check_final,
    check_regions,
    check_server,
    check_sharing,
    check_staged,
    check_standby,
)
from tests.host_runs import Run
from tests.host_server_draws import (
    draw_final_world,
    draw_regions_world,
    draw_server_world,
    draw_sharing_world,
    draw_staged_world,
    draw_standby_world,
)
from tests.host_world_draws import (
    draw_cut_world,
    draw_late_world,
    draw_lying_world,
    draw_open_world,
    draw_resuming_world,
    draw_world,
)
from tests.host_worlds import World
from tests.shrinking import does_fail, shrink, simpler_host_worlds

from edgegossip.contract.protocol import Seconds

WORLDS: dict[str, tuple[Callable[[int], World], Callable[[World], Run]]] = {
    "peers": (draw_world, check),
    "resuming": (draw_resuming_world, check),
    "cuts": (draw_cut_world, check),
    "late": (draw_late_world, check),
    "lies": (draw_lying_world, check),
    "open": (draw_open_world, check),
    "servers": (draw_server_world, check_server),
    "standby": (draw_standby_world, check_standby),
    "sharing": (draw_sharing_world, check_sharing),
    "regions": (draw_regions_world, check_regions),
    "stages": (draw_staged_world, check_staged),
    "final": (draw_final_world, check_final),
}
"""Who is in a world: how one is drawn, and what must hold in it."""
_MOST_SHRUNK = 3
"""Shrinking takes as long as dozens of worlds."""


def try_world(kind: str, seed: int) -> tuple[int, str, Seconds]:
    """Run a world; return its fault, if any, and its wall time."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    draw, check_it = WORLDS[kind]
    began = time.perf_counter()
    try:
        check_it(draw(seed))
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}", time.perf_counter() - began
    return seed, "", time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=[*WORLDS], default="peers")
    parser.add_argument("--worlds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first world")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.worlds)
    began = time.perf_counter()
    gc.freeze()  # all modules stay, so no collection need look at them: an eighth of the time
    with multiprocessing.Pool(options.processes) as pool:
        found = [*pool.imap_unordered(partial(try_world, options.kind), seeds, chunksize=8)]
    seconds = time.perf_counter() - began
    wrong = sorted((seed, what) for seed, what, _ in found if what)
    figures = {
        "worlds": len(found),
        "violations": len(wrong),
        "seconds": seconds,
        "worlds_per_second": len(found) / seconds,
        "median_seconds": statistics.median(each for *_, each in found),
    }
    if options.json:
        print(json.dumps({**figures, "wrong": wrong}))
        return bool(wrong)
    draw, check_it = WORLDS[options.kind]
    for number, (seed, what) in enumerate(wrong):
        world = draw(seed)
        print(f"world {seed} ({world.name}, {_in_short(world)}): {what}")
        if number < _MOST_SHRUNK:
            print("  shrunk:", shrink(world, does_fail(check_it), simpler_host_worlds))
    print(figures)
    return bool(wrong)


def _in_short(world: World) -> str:
    kinds = [each.kind for each in world.disturbances]
    return ", ".join([*kinds, *(["late"] if any(world.start_at) else []), world.lie]).strip(
        ", "
    )


if __name__ == "__main__":
    sys.exit(main())
