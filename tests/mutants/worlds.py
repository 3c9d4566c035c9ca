"""Run worlds of some kinds until one of them breaks a rule.

    python -m tests.mutants.worlds peers simulated --algorithms gosgd --worlds 400

Prints one JSON object: how many worlds ran, and which one failed by which oracle.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeAlias

import torch
from tests.host_swarm import WORLDS
from tests.host_world_draws import draw_world as draw_peers
from tests.swarm import (
    test_balanced_swarm,
    test_changing_swarm,
    test_push_sum_swarm,
    test_swarm,
)

import edgegossip

MAX_SECONDS = 30.0
"""A world that computes for longer goes on for ever; the slowest healthy one takes three."""

SIMULATED: dict[str, tuple[Sequence[str], Callable[[str, int], None]]] = {
    "simulated": (
        [*test_swarm.EACH],
        lambda name, seed: test_swarm.check_worlds(name, [seed]),
    ),
    "changing": (
        test_changing_swarm.EACH,
        lambda name, seed: test_changing_swarm.check_worlds(name, [seed]),
    ),
    "balanced": (test_balanced_swarm.INNER, test_balanced_swarm.check),
    "push-sum": (test_push_sum_swarm.NAMES, test_push_sum_swarm.check_world),
}
"""The algorithm swarms: whom they run, and the check of one world."""

KINDS = (*WORLDS, *SIMULATED)

Try: TypeAlias = tuple[str, Callable[[], object]]


def tries(kind: str, names: Sequence[str], first: int) -> Iterator[Try]:
    """Worlds of one kind from seed `first` on, only with the algorithms in `names` if any."""
    if kind in SIMULATED:
        whom, check = SIMULATED[kind]
        whom = [name for name in whom if name in names] or whom
        for seed in itertools.count(first):
            name = whom[seed % len(whom)]
            yield f"{kind} {seed} ({name})", partial(check, name, seed)
    draw, check_it = WORLDS[kind]
    for seed in itertools.count(first):
        is_free = kind == "peers" and names
        world = draw_peers(seed, names[seed % len(names)]) if is_free else draw(seed)
        if not names or world.name in names:
            yield f"{kind} {seed} ({world.name})", partial(check_it, world)


def first_failure(
    kinds: Sequence[str], names: Sequence[str], num_worlds: int, first: int
) -> dict[str, object]:
    """Run worlds of these kinds in turn until one fails; say how many ran, and what failed."""
    turns = itertools.chain.from_iterable(
        zip(*(tries(kind, names, first) for kind in kinds), strict=True)
    )
    began = time.perf_counter()
    gc.freeze()  # see `tests.host_swarm`
    found: dict[str, object] = {"num_worlds": num_worlds}
    for number, (label, run) in enumerate(itertools.islice(turns, num_worlds), 1):
        # Its own time, not the clock's: other programs may slow it down. Again and again: a
        # host catches and logs what its transport raises.
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS, 1.0)
        try:
            run()
        except Exception as error:
            found = {"num_worlds": number, "world": label, **describe(error)}
            break
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return {**found, "seconds": round(time.perf_counter() - began, 2)}


def describe(error: Exception) -> dict[str, str]:
    """The oracle that raised `error`, as the innermost function of the tests, and its words."""
    here = Path(__file__).parents[1]
    frames = traceback.extract_tb(error.__traceback__)
    tests = [each for each in frames if Path(each.filename).is_relative_to(here)]
    words = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return {"oracle": tests[-1].name, "error": words}


def _give_up(_number: int, _frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"the world takes more than {MAX_SECONDS:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--algorithms", nargs="*", default=[])
    parser.add_argument("--worlds", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--sources", type=Path, help="where edgegossip must be imported from")
    options = parser.parse_args()
    assert edgegossip.__file__ is not None
    if options.sources and not Path(edgegossip.__file__).is_relative_to(options.sources):
        parser.error(f"edgegossip comes from {edgegossip.__file__}, not {options.sources}")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    signal.signal(signal.SIGVTALRM, _give_up)
    found = first_failure(options.kinds, options.algorithms, options.worlds, options.first)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
