"""HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

_MAX_BYTES = 8 * 2**20
"""Maximum bytes of a page to embed in a notebook, which keeps a copy with each output."""


def framed(page: Path, height: int = 640) -> str | None:
    """A page as a frame for a notebook; None if the page cannot be read.

    The frame contains the whole page, so a copy of the notebook still shows it. It has its own
    styles and runs no scripts. A page that is too large becomes a link.

    Args:
        page: An HTML file that loads nothing from elsewhere.
        height: Height of the frame in pixels.
    """
    try:
        if page.stat().st_size > _MAX_BYTES:
            link = escape(page.resolve().as_uri(), quote=True)
            return f'<p>The report is large: <a href="{link}">{escape(str(page))}</a></p>'
        content = page.read_text(encoding="utf-8")
    except OSError:
        return None
    return (
        f'<iframe srcdoc="{escape(content, quote=True)}" sandbox="" loading="lazy" '
        f'style="box-sizing: border-box; width: 100%; height: {height}px; '
        f'border: 1px solid #8884"></iframe>'
    )


def table(title: str, rows: Mapping[str, str], note: str) -> str:
    """A small table for a notebook.

    >>> table("a", {"loss": "0.5"}, "b")
    '<table><caption>a</caption><tr><th>loss</th><td>0.5</td></tr></table><p>b</p>'
    """
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{lines}</table><p>{escape(note)}</p>"
