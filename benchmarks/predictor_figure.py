"""Forecasts' errors and the use of resources by size: figures like the paper's Fig. 9 and 10.

Draws what `predictor_real` has measured:

    sudo python -m benchmarks.predictor_real --json > FILE.json
    python -m benchmarks.predictor_figure FILE.json ERRORS.svg USES.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.predictor_real import Block, blocks_of, summary
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from edgegossip.machine.loads import MB
from edgegossip.report.style import BASELINE_COLOR, RUN_COLORS, figure_style, new_figure, render

TITLES = {"wordcount": "WordCount", "sort": "Sort"}
USES = {
    "cores": ("use of the cores", 0.01, "%"),
    "network": ("network, MB/s", MB, ""),
    "disk": ("disk, MB/s", MB, ""),
}
"""For each part of U: a title, its unit, and a sign for the axis."""


def draw_errors(blocks: Sequence[Block]) -> bytes:
    """Draw the errors of all blocks as SVG, one panel per program."""
    with figure_style():
        figure = new_figure(9.6, 3.6)
        panels = figure.subplots(1, len(TITLES), sharex=True, sharey=True)
        for axes, kind, color in zip(panels, TITLES, RUN_COLORS, strict=False):
            own = [block for block in blocks if block.kind == kind]
            draw_program(axes, own, color)
            mean = summary([block.error for block in own if not block.is_first])["mean"]
            axes.set_title(f"{TITLES[kind]}: mean error {mean:.1%}", fontsize=10)
            axes.set_xlabel("nominal size of the files, MB")
        panels[0].set_ylabel("error of the forecast")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        return render(figure, "svg")


def draw_program(axes: Axes, blocks: Sequence[Block], color: str) -> None:
    """Draw a dot per block, and the mean magnitude per size without first blocks."""
    _log_sizes(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda error, _: f"{100 * error:.0f} %"))
    axes.axhline(0, color=BASELINE_COLOR, linewidth=1)
    for is_first, marker, face in ((True, "D", "white"), (False, "o", color)):
        chosen = [block for block in blocks if block.is_first == is_first]
        axes.plot(
            [block.num_bytes / MB for block in chosen],
            [block.error for block in chosen],
            marker,
            color=color,
            markerfacecolor=face,
            markersize=4,
            label="the load has just begun" if is_first else "a block of training",
        )
    later = [block for block in blocks if not block.is_first]
    sizes = sorted({block.num_bytes for block in later})
    axes.plot(
        [size / MB for size in sizes],
        [summary([b.error for b in later if b.num_bytes == size])["mean"] for size in sizes],
        color=color,
        linewidth=1.4,
        alpha=0.6,
        label="mean magnitude of a size",
    )


def draw_uses(blocks: Sequence[Block]) -> bytes:
    """Draw each part of U by size as SVG: means over seconds, and twice their deviation."""
    with figure_style():
        figure = new_figure(9.6, 3.2)
        panels = figure.subplots(1, len(USES), sharex=True)
        for axes, (name, (title, unit, sign)) in zip(panels, USES.items(), strict=True):
            _log_sizes(axes)
            axes.yaxis.set_major_formatter(
                FuncFormatter(lambda y, _, sign=sign: f"{y:g} {sign}".strip())
            )
            for shift, kind, color in zip((0.93, 1.07), TITLES, RUN_COLORS, strict=False):
                own = [block for block in blocks if block.kind == kind]
                sizes = sorted({block.num_bytes for block in own})
                uses = [seconds_of(own, size, name, unit) for size in sizes]
                axes.errorbar(
                    [shift * size / MB for size in sizes],  # or bars would hide each other
                    [statistics.fmean(each) for each in uses],
                    [2 * statistics.pstdev(each) for each in uses],
                    color=color,
                    fmt="o-",
                    markersize=4,
                    linewidth=1.4,
                    elinewidth=1,
                    capsize=2,
                    label=TITLES[kind],
                )
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("nominal size, MB")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        return render(figure, "svg")


def seconds_of(
    blocks: Sequence[Block], num_bytes: int, name: str, unit: float = 1.0
) -> list[float]:
    """One part of U in all seconds of the blocks of a size, by `unit`."""
    return [
        getattr(use, name) / unit
        for block in blocks
        if block.num_bytes == num_bytes
        for use in block.uses
    ]


def _log_sizes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,g}"))


def blocks_from(found: Mapping[str, Any]) -> list[Block]:
    """The blocks of all repeats of a kept measurement."""
    return [block for repeat in found["repeats"] for block in blocks_of(repeat)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kept", type=Path, help="JSON of benchmarks.predictor_real")
    parser.add_argument("errors", type=Path, help="SVG file to write, like Fig. 9")
    parser.add_argument("uses", type=Path, help="SVG file to write, like Fig. 10")
    options = parser.parse_args()
    blocks = blocks_from(json.loads(options.kept.read_text()))
    options.errors.write_bytes(draw_errors(blocks))
    options.uses.write_bytes(draw_uses(blocks))


if __name__ == "__main__":
    main()
