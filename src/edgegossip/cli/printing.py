"""Safe output, with escaped control characters."""

from __future__ import annotations

import logging


def printable(text: str) -> str:
    r"""Escape the control characters of `text`, except line breaks.

    >>> printable("a file named \x1b[2J\r, in\ntwo lines")
    'a file named \\x1b[2J\\r, in\ntwo lines'
    """
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


class _OneLine(logging.Formatter):
    """Formats each record as one line, even if it contains text from other machines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _escaped(super().formatMessage(record))


def log_to_console(level: int = logging.WARNING, style: str = "%(message)s") -> None:
    """Print log lines to standard error.

    Args:
        level: Minimum level.
        style: Format for `logging.Formatter`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine(style))
    logging.basicConfig(handlers=[handler], level=level)
