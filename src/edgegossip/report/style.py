"""The style of figures: one palette, one type size, the same bytes for the same data."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib as mpl
import matplotlib.style
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

INK = "#22272e"
MUTED = "#6a737d"
GRID = "#e4e7eb"
WAITING = "#e3e6ea"
SENDING = "#e69f00"

BASELINE_COLOR = "#5b6470"
# Okabe & Ito (2008), distinct for all common kinds of color vision; orange is kept for sending.
RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#882255")

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#b4bbc4",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.6,
    "hatch.color": "#9aa3ad",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 2.2,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "figure.facecolor": "white",
    "savefig.dpi": 150,
    # Users choose names, so a dollar sign in a name must not begin a formula.
    "text.parse_math": False,
    # Without these two, ids and dates differ from one run of the program to the next.
    "svg.hashsalt": "edgegossip",
    "svg.fonttype": "path",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A figure as files, with descriptions in words.

    Attributes:
        name: File name without suffix.
        heading: Short description.
        caption: Explanation.
        alt: Description of the picture.
        png: Raster image.
        svg: Vector image.
    """

    name: str
    heading: str
    caption: str
    alt: str
    png: bytes
    svg: bytes


def picture(figure: Figure, *, name: str, heading: str, caption: str, alt: str) -> Picture:
    """Encode a figure within `figure_style`; the attributes are those of `Picture`."""
    png, svg = render(figure, "png"), render(figure, "svg")
    return Picture(name=name, heading=heading, caption=caption, alt=alt, png=png, svg=svg)


def write_axis(axis: Axis, words: Callable[[float], str]) -> None:
    """Write the numbers on an axis as `words` does, for example with units."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: words(value)))


@contextmanager
def figure_style() -> Iterator[None]:
    """A context with the report's style, independent of the user's matplotlibrc."""
    with mpl.style.context(["default", STYLE]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of `width` x `height` inches that needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def render(figure: Figure, image_format: str) -> bytes:
    """Encode `figure` as "png" or "svg"; equal figures give equal bytes."""
    metadata = {"Date": None, "Creator": None} if image_format == "svg" else {"Software": None}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=image_format, metadata=metadata)
    return buffer.getvalue()


def run_colors(names: list[str], baseline: str | None) -> dict[str, str]:
    """Give each run one color for the whole report; the baseline is gray.

    >>> run_colors(["all-reduce", "gossip"], baseline="all-reduce")
    {'all-reduce': '#5b6470', 'gossip': '#0072b2'}
    """
    others = [name for name in names if name != baseline]
    colors = {name: RUN_COLORS[i % len(RUN_COLORS)] for i, name in enumerate(others)}
    return {name: colors.get(name, BASELINE_COLOR) for name in names}
