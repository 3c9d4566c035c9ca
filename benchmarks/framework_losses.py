"""Losses of framework scripts that joined a run, compared with one process.

    python -m benchmarks.framework_losses           a table
    python -m benchmarks.framework_losses --json    one JSON object

`examples/frameworks/lightning_regression.py` and `transformers_gpt.py` (books from
$EDGEGOSSIP_DATA) run alone and as two and four workers by `edgegossip script`. Each worker
trains on its own share, so all together process as many samples as one process alone does. A
ratio is the test loss of the common model over that of the single process with the same seed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kept import about

from edgegossip.recipes.tasks import default_data_dir

EXAMPLES = Path(__file__).parents[1] / "examples" / "frameworks"
PACKAGES = ("torch", "lightning", "transformers", "accelerate")
LOSS = re.compile(r"^test loss (\d+\.\d+)$", re.MULTILINE)


def loss(script: list[str], num_workers: int, seed: int) -> float:
    """The test loss that rank 0 prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "edgegossip", "script"),
                *("-n", str(num_workers), "--out", folder, *script, "--seed", str(seed)),
            ],
            capture_output=True,
            text=True,
            cwd=folder,
            check=False,
        )
    found = LOSS.search(done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"{script[0]} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(found[1])


def scripts(num_pieces: int) -> dict[str, list[str]]:
    books = sorted(str(each) for each in (default_data_dir() / "books").glob("*.txt"))
    return {
        "lightning_regression": [str(EXAMPLES / "lightning_regression.py")],
        "transformers_gpt": [
            *(str(EXAMPLES / "transformers_gpt.py"), "--samples", str(num_pieces)),
            *("--text", *books),
        ],
    }


def measure(num_pieces: int, seeds: range, only: str | None) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, script in scripts(num_pieces).items():
        if only not in (None, name):
            continue
        losses = {n: [loss(script, n, seed) for seed in seeds] for n in (1, 2, 4)}
        ratios = {
            n: [a / b for a, b in zip(found, losses[1], strict=True)]
            for n, found in losses.items()
            if n > 1
        }
        figures[name] = {
            "losses": {str(n): found for n, found in losses.items()},
            "ratios": {
                str(n): [round(each, 4) for each in found] for n, found in ratios.items()
            },
            "median_ratios": {
                str(n): round(statistics.median(found), 4) for n, found in ratios.items()
            },
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--pieces", type=int, default=40_000, help="of text, 32 bytes each")
    parser.add_argument("--only", help="one of the examples")
    options = parser.parse_args()
    origin = about(options)
    figures = measure(options.pieces, range(options.seeds), options.only)
    if options.json:
        used = {name: importlib.metadata.version(name) for name in PACKAGES}
        print(json.dumps({**origin, "frameworks": used, **figures}))
        return
    for name, found in figures.items():
        print(f"{name}: losses {found['losses']}, ratios {found['ratios']}")


if __name__ == "__main__":
    main()
