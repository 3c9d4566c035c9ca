"""How many deliberate faults the swarms notice: each on a copy of the sources.

    python -m tests.mutants                             all, each in at most 400 worlds
    python -m tests.mutants --only no-resend --worlds 50
    python -m tests.mutants --output found.jsonl        goes on where the file ends

A fault is killed if a world fails with it that passes without it. The exit code is 1 if fewer
than `--wanted` of the faults are, or if a world fails without any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeAlias

from tests.mutants.mutant import ROOT, SOURCES, Mutant, read_all

WANTED = 0.9
Found: TypeAlias = dict[str, Any]


def run_worlds(mutant: Mutant, sources: Path, num_worlds: int, first: int) -> Found:
    """Run the worlds of `mutant` with `edgegossip` from `sources`."""
    command = [sys.executable, "-m", "tests.mutants.worlds", *mutant.kinds]
    command += ["--worlds", str(num_worlds), "--first", str(first), "--sources", str(sources)]
    if mutant.algorithms:
        command += ["--algorithms", *mutant.algorithms]
    path = os.pathsep.join([str(sources), str(ROOT)])
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        # A source that cannot be imported is no fault that a world could notice.
        raise RuntimeError(f"{mutant.name}: {ran.stderr.strip().splitlines()[-1]}")
    found: Found = json.loads(ran.stdout.splitlines()[-1])
    return found


def try_mutant(mutant: Mutant, num_worlds: int, first: int) -> Found:
    """Whether and how the worlds notice `mutant`."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        found = run_worlds(mutant, mutant.write(Path(folder)), num_worlds, first)
    is_killed = "oracle" in found
    if is_killed:
        # The same worlds, so that the last one comes after as many others.
        clean = run_worlds(mutant, SOURCES.parent, found["num_worlds"], first)
        if "oracle" in clean:
            return {"name": mutant.name, "killed": False, **clean, "fails_without": True}
    return {"name": mutant.name, "killed": is_killed, **found}


def try_all(
    mutants: Sequence[Mutant], num_worlds: int, first: int, num_jobs: int
) -> Iterator[Found]:
    with ThreadPoolExecutor(num_jobs) as pool:
        jobs = [pool.submit(try_mutant, mutant, num_worlds, first) for mutant in mutants]
        for job in as_completed(jobs):
            yield job.result()


def line(found: Found) -> str:
    name, worlds = found["name"], found["num_worlds"]
    if found["killed"]:
        return f"{name}: killed after {worlds} by {found['oracle']} in {found['world']}"
    if "fails_without" in found:
        return f"{name}: {found['world']} fails without it: {found['error']}"
    return f"{name}: survives {worlds} worlds"


def summary(found: Sequence[Found]) -> str:
    """Killed faults in number and in share.

    >>> summary([{"killed": True}, {"killed": False}])
    '1 of 2 killed (50 %)'
    """
    num_killed = sum(each["killed"] for each in found)
    return f"{num_killed} of {len(found)} killed ({num_killed / max(1, len(found)):.0%})"


def known(output: Path | None) -> Iterable[Found]:
    if output is None or not output.exists():
        return []
    return [json.loads(each) for each in output.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", default=[])
    parser.add_argument("--worlds", type=int, default=400)
    parser.add_argument("--first", "--seed", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="JSON lines; those named there are done")
    parser.add_argument("--wanted", type=float, default=WANTED, help="share to be killed")
    options = parser.parse_args()
    mutants = read_all()
    if unknown := {*options.only} - mutants.keys():
        parser.error(f"no mutant {', '.join(sorted(unknown))}; there are {', '.join(mutants)}")
    names = options.only or [*mutants]
    found = [each for each in known(options.output) if each["name"] in names]
    left = [mutants[name] for name in names if name not in {each["name"] for each in found}]
    for each in try_all(left, options.worlds, options.first, options.jobs):
        found.append(each)
        print(line(each), flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(each) + "\n")
    for each in sorted(found, key=lambda each: each["name"]):
        if not each["killed"]:
            print(line(each))
    print(summary(found))
    num_killed = sum(each["killed"] for each in found)
    is_wrong = any("fails_without" in each for each in found)
    return is_wrong or num_killed < options.wanted * len(found)


if __name__ == "__main__":
    sys.exit(main())
