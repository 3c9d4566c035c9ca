"""Run the next cells of the queue, or say how long the next one would take.

    EDGEGOSSIP_DATA=FOLDER python -m benchmarks.full_size --minutes 9     with a GPU
    python -m benchmarks.full_size --list                                 all cells and states
    EDGEGOSSIP_DATA=FOLDER python -m benchmarks.full_size --only b --dry  a forecast alone

Without a GPU, nothing runs: the next cell's time is measured from a few of its steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import psutil
from benchmarks.full_size import experiments, speeds
from benchmarks.full_size.cells import Machine
from benchmarks.full_size.forecast import best_device
from benchmarks.full_size.queue import Limits, Queue
from benchmarks.full_size.state import FILE_BYTES
from benchmarks.kept import about

from edgegossip.contract.errors import EdgeGossipError, Interrupted
from edgegossip.recipes.tasks import default_data_dir

RESULTS = Path(__file__).parents[1] / "results" / "full-size"
LETTERS = "abcdefg"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    cells = [
        cell
        for cell in (*speeds.cells(), *experiments.cells())
        if cell.letter in options.only and options.name in cell.name
    ]
    machine = Machine(data_dir=options.data_dir, torch_device=best_device())
    origin = about(options)
    queue = Queue(cells, options.out, machine, origin, row_of=experiments.row_of)
    if options.list:
        print("\n".join(queue.listed()))
        return 0
    is_for_work = machine.torch_device != "cpu" or options.on_cpu
    try:
        if options.dry or not is_for_work:
            queue.foretell()
            return 0
        since_start = time.time() - psutil.Process().create_time()
        limits = Limits(
            minutes=options.minutes - since_start / 60, state_bytes=options.state_mib * 2**20
        )
        return 0 if queue.run(limits) else 1
    except Interrupted as error:
        print(error, file=sys.stderr)
        return 130
    except EdgeGossipError as error:
        print(error, file=sys.stderr)
        return 2


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.full_size", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="hard limit on the time")
    parser.add_argument("--only", nargs="+", choices=LETTERS, default=LETTERS, help="letters")
    parser.add_argument("--name", default="", help="only cells whose name has this part")
    parser.add_argument("--list", action="store_true", help="print all cells and their states")
    parser.add_argument("--dry", action="store_true", help="forecast the next cell only")
    parser.add_argument("--on-cpu", action="store_true", help="run cells without a GPU, too")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument(
        "--data-dir", type=Path, default=default_data_dir(), help="default: $EDGEGOSSIP_DATA"
    )
    parser.add_argument(
        "--state-mib",
        type=int,
        default=4 * FILE_BYTES // 2**20,
        help="largest state of a run that is begun although it does not fit into the minutes, "
        "kept in files of at most 12 MiB",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
