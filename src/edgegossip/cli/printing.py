"""Safe output, with escaped control characters."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TextIO

TIMED = "%(asctime)s %(levelname)s %(message)s"
"""Style of log lines of a command that runs for long."""
_LOG = logging.getLogger("edgegossip.cli")
_USUAL = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""Attributes of every log record; others are fields of one line."""


def printable(text: str) -> str:
    r"""Escape the control characters of `text`, except line breaks.

    >>> printable("a file named \x1b[2J\r, in\ntwo lines")
    'a file named \\x1b[2J\\r, in\ntwo lines'
    """
    return "\n".join(map(_escaped, text.split("\n")))


def _escaped(line: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Options for what a command reports on standard error.

    Args:
        log_format: text, or json: one JSON object per line.
    """

    log_format: Literal["text", "json"] = "text"


class _OneLine(logging.Formatter):
    """Formats each record as one line, even if it contains text from other machines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _escaped(super().formatMessage(record))


class _JsonLine(logging.Formatter):
    """Formats each record as a JSON object, which escapes line breaks and control characters.

    Args:
        fields: Fields that every line has.
    """

    def __init__(self, fields: dict[str, object]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            **self._fields,
            "message": record.getMessage(),
        }
        line |= {name: x for name, x in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a live table replaces while it is shown."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        pass


def log_to_console(
    level: int = logging.WARNING,
    style: str = "%(message)s",
    options: LogOptions | None = None,
    **fields: object,
) -> None:
    """Print log lines to standard error.

    Args:
        level: Minimum level.
        style: Format for `logging.Formatter`, if the lines are text.
        options: The format; by default text.
        fields: Fields that every line has, if it is JSON.
    """
    is_json = options is not None and options.log_format == "json"
    handler = _Stderr()
    handler.setFormatter(_JsonLine(fields) if is_json else _OneLine(style))
    logging.basicConfig(handlers=[handler], level=level)
    if is_json:
        logging.captureWarnings(capture=True)
        sys.excepthook = _log_crash


def _log_crash(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _LOG.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def warn(text: str) -> None:
    """Print a warning of the command itself to standard error."""
    _say(logging.WARNING, "warning", text)


def complain(text: str) -> None:
    """Print to standard error why the command ends."""
    _say(logging.ERROR, "edgegossip", text)


def _say(level: int, prefix: str, text: str) -> None:
    if any(isinstance(each.formatter, _JsonLine) for each in logging.getLogger().handlers):
        _LOG.log(level, "%s", text)
    else:
        print(f"{prefix}: {printable(text)}", file=sys.stderr, flush=True)
