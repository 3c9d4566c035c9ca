"""Size of an installation, and how long it takes to start.

    python -m benchmarks.install

Run it with the Python of a clean environment, into which `pip install` put the package alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

HEAVY = ("matplotlib", "scikit-learn", "scipy")
"""Direct dependencies that a board which only trains can leave out."""
REPEATS = 9


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution and all that it needs, without extras, by name."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in found:
        return found
    try:
        found[name] = distribution(name)
    except PackageNotFoundError:  # for another system, by its marker
        return found
    for line in found[name].requires or ():
        if "extra ==" not in line:
            needed(re.split(r"[^\w.-]", line, maxsplit=1)[0], found)
    return found


def megabytes(distributions: dict[str, Distribution]) -> float:
    """Size of the files on the disk."""
    paths = {Path(str(d.locate_file(f))) for d in distributions.values() for f in d.files or ()}
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def seconds(*words: str) -> float:
    """The shortest time of a new Python, of several."""
    return min(_once(words) for _ in range(REPEATS))


def _once(words: tuple[str, ...]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    everything = needed("edgegossip", {})
    torch = needed("torch", {})
    without = {name: d for name, d in everything.items() if name not in torch}
    heavy: dict[str, Distribution] = {}
    for name in HEAVY:
        needed(name, heavy)
    kept = needed("numpy", {}) | needed("cryptography", {}) | needed("eclipse-zenoh", {})
    light = {name: d for name, d in without.items() if name not in heavy or name in kept}
    print(
        json.dumps(
            {
                "packages": len(everything),
                "megabytes": round(megabytes(everything)),
                "megabytes_without_torch": round(megabytes(without)),
                "megabytes_light_without_torch": round(megabytes(light)),
                "megabytes_own": round(megabytes({"edgegossip": everything["edgegossip"]}), 1),
                "seconds_python": round(seconds("-c", "pass"), 3),
                "seconds_import": round(seconds("-c", "import edgegossip"), 3),
                "seconds_help": round(seconds("-m", "edgegossip", "--help"), 3),
                "seconds_list": round(seconds("-m", "edgegossip", "list"), 3),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
