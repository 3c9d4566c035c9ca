"""The errors of forecasts beside WordCount and Sort, by size: a figure like the paper's Fig. 9.

Draws what `predictor_real` has measured:

    python -m benchmarks.predictor_real --json > FILE.json
    python -m benchmarks.predictor_figure FILE.json FILE.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.predictor_real import Block, summary
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from edgegossip.machine.loads import MB
from edgegossip.report.style import BASELINE_COLOR, RUN_COLORS, figure_style, new_figure, render

TITLES = {"wordcount": "WordCount", "sort": "Sort"}


def draw(found: Mapping[str, Any]) -> bytes:
    """Draw the errors of all blocks as SVG, one panel per program."""
    with figure_style():
        figure = new_figure(9.6, 3.6)
        kinds = found["by_kind"]
        blocks = [Block(**block) for block in found["blocks"]]
        panels = figure.subplots(1, len(kinds), sharex=True, sharey=True, squeeze=False)[0]
        for axes, kind, color in zip(panels, kinds, RUN_COLORS, strict=False):
            draw_program(axes, [block for block in blocks if block.kind == kind], color)
            axes.set_title(f"{TITLES[kind]}: mean error {kinds[kind]['mean']:.1%}", fontsize=10)
            axes.set_xlabel("size of the files, MB")
        panels[0].set_ylabel("error of the forecast")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        return render(figure, "svg")


def draw_program(axes: Axes, blocks: Sequence[Block], color: str) -> None:
    """Draw a dot per block, and the mean magnitude per size without first blocks."""
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{100 * error:.0f} %"))
    axes.axhline(0, color=BASELINE_COLOR, linewidth=1)
    for is_first, marker, face in ((False, "o", color), (True, "D", "white")):
        chosen = [block for block in blocks if block.is_first == is_first]
        axes.plot(
            [block.num_bytes / MB for block in chosen],
            [block.error for block in chosen],
            marker,
            color=color,
            markerfacecolor=face,
            markersize=5,
            label="the load has just begun" if is_first else "a block of training",
        )
    errors: dict[int, list[float]] = {}
    for block in blocks:
        if not block.is_first:
            errors.setdefault(block.num_bytes, []).append(block.error)
    axes.plot(
        [size / MB for size in errors],
        [summary(each)["mean"] for each in errors.values()],
        color=color,
        linewidth=1.4,
        alpha=0.6,
        label="mean magnitude of a size",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kept", type=Path, help="JSON of benchmarks.predictor_real")
    parser.add_argument("figure", type=Path, help="SVG file to write")
    options = parser.parse_args()
    options.figure.write_bytes(draw(json.loads(options.kept.read_text())))


if __name__ == "__main__":
    main()
