"""Whom robust mixing distrusts: the mean share of its weight that each neighbor was given."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from edgegossip.contract.robust import TRUST
from edgegossip.report.folder import ReportData, Run
from edgegossip.report.style import Picture, figure_style, new_figure, picture
from edgegossip.report.units import listing, percent

MOST_NUMBERS = 12
"""Maximum number of workers for which a map has numbers in its cells."""


def trust_of(run: Run) -> NDArray[np.float64]:
    """Mean share by receiver and sender, [num_workers, num_workers]; NaN without a note."""
    size = len(run.log.workers)
    total, count = np.zeros((size, size)), np.zeros((size, size))
    for note in run.log.notes:
        if note.kind != TRUST or note.rank >= size:
            continue
        for name, share in note.numbers.items():
            if name.isdecimal() and len(name) < 9 and int(name) < size:
                total[note.rank, int(name)] += min(max(share, 0.0), 1.0)
                count[note.rank, int(name)] += 1
    shares = np.full((size, size), np.nan)
    np.divide(total, count, out=shares, where=count > 0)
    return shares


def trust_pictures(folder: ReportData) -> Iterator[Picture]:
    """Draw a map for each run with a robust rule."""
    for run in folder.runs:
        shares = trust_of(run)
        if not np.isnan(shares).all():
            name = f"trust-{run.name}" if folder.is_comparison else "trust"
            yield _picture(name, run, shares)


def _picture(name: str, run: Run, shares: NDArray[np.float64]) -> Picture:
    with figure_style():
        figure = new_figure(6.4, 5.0)
        axes = figure.add_subplot()
        axes.set_title(f"Weight given by {run.name}")
        image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1)
        figure.colorbar(image, ax=axes, label="share of the sender's weight")
        axes.set_xlabel("model of worker")
        axes.set_ylabel("given by worker")
        axes.grid(visible=False)
        if len(shares) <= MOST_NUMBERS:
            for (receiver, sender), share in np.ndenumerate(shares):
                if not np.isnan(share):
                    color = "black" if share > 0.6 else "white"
                    text = f"{share:.2f}"
                    axes.text(sender, receiver, text, ha="center", va="center", color=color)
        return picture(
            figure,
            name=name,
            heading=f"Whom {run.name} distrusts",
            caption="Mean over the run. A dark column is a worker that others distrust: robust "
            "mixing leaves its model out, or clips it.",
            alt=f"Map of shares. {listing(_words(shares))}.",
        )


def _words(shares: NDArray[np.float64]) -> list[str]:
    """Say how far each sender was trusted, the least trusted first."""
    known = [k for k in range(len(shares)) if not np.isnan(shares[:, k]).all()]
    means = {k: float(np.nanmean(shares[:, k])) for k in known}
    least = sorted(known, key=lambda k: (means[k], k))[:MOST_NUMBERS]
    return [f"worker {k}: {percent(means[k])}" for k in least]
