"""A recipe's comparison with several seeds: the table of the README, and others like it.

    python -m benchmarks.comparisons quickstart --seeds 0 1 2 3 4 --json FILE

The summaries are those of `edgegossip compare RECIPE --seed SEED`, without the runs' logs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kept import about, rounded

from edgegossip.recipes.call import RecipeCall
from edgegossip.runs.comparison import compare
from edgegossip.runs.files import read_json, write_json


def summary(recipe: str, seed: int) -> dict[str, Any]:
    """All algorithms of `recipe` with one seed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "runs")
        comparison = RecipeCall(recipe).replace(seed=seed).result()
        compare(comparison, out=out, recipe=recipe, num_threads=1)
        found: dict[str, Any] = read_json(out / "summary.json")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path, help="file for the summaries")
    options = parser.parse_args()
    found = about(options)
    found["summaries"] = {
        seed: rounded(summary(options.recipe, seed)) for seed in options.seeds
    }
    if options.json:
        write_json(options.json, found)
    else:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
