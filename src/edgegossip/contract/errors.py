"""Errors that name a remedy. Arguments out of range raise plain `ValueError`s."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable


class EdgeGossipError(Exception):
    """Base of the package's errors; the CLI prints their message without a traceback."""


class UsageError(EdgeGossipError):
    """The command, or a name or option in it, is wrong: exit code 2."""


class DataError(EdgeGossipError):
    """A data file is missing, truncated or inconsistent."""


class TrainingError(EdgeGossipError):
    """Training cannot continue, for instance because a loss is not finite."""


class PlatformError(EdgeGossipError):
    """Too many platforms have failed for the run to continue with its settings."""


class ServerLostError(EdgeGossipError):
    """The parameter server is lost and did not return in time."""


class RunFolderError(EdgeGossipError):
    """A run folder cannot be written, read or resumed."""


class Interrupted(EdgeGossipError):  # noqa: N818 - nothing went wrong
    """A signal stopped the run; its folder is valid and can be resumed."""


class NetworkError(EdgeGossipError):
    """This machine cannot take part because of an address, a certificate or a peer."""


class LocalProtocolError(EdgeGossipError):
    """The algorithm broke the contract, for instance with two `Train` effects at once."""


class UndescribedError(LocalProtocolError):
    """A worker sent a message that its own algorithm's schema does not describe."""


def no_validation_data(rank: int) -> LocalProtocolError:
    """Worker `rank` requested `Evaluate`, but its driver has no validation data."""
    return LocalProtocolError(
        f"worker {rank} asked to Evaluate, but this run has no validation data; take some "
        "out of the training data with edgegossip.hold_out, or give a TrainingLoop evaluate"
    )


def deadlock_error(now: float, ranks: list[int]) -> LocalProtocolError:
    """No event is left at `now`, but these workers have not finished."""
    return LocalProtocolError(
        f"at {now:g} s no event is left, but workers {ranks[:8]} have not finished: "
        "they wait forever. Where messages can be lost, give the algorithm a timeout, or "
        "push-sum, ADPSGD and parameter servers resend_after"
    )


def unknown_name(what: str, given: str, allowed: Iterable[str]) -> str:
    """List the known names and suggest the closest; a name also matches without ``prefix/``.

    >>> unknown_name("topology", "rnig", ["torus", "ring"])
    "unknown topology 'rnig'; choose one of 'ring', 'torus' (did you mean 'ring'?)"
    """
    names = sorted(allowed, key=_numbers_by_value)
    meant = {name.rpartition("/")[2]: name for name in names} | {name: name for name in names}
    close = difflib.get_close_matches(given, meant, n=1)
    listed = f"unknown {what} {given!r}; choose one of {', '.join(map(repr, names))}"
    if not close:
        return listed
    hint = f"did you mean {meant[close[0]]!r}?"
    # A hint is worth more than two lines of names.
    return f"{listed} ({hint})" if len(listed) < 200 else f"unknown {what} {given!r}; {hint}"


def without_password(url: str) -> str:
    """The address without user, password and options, which must not appear in output.

    >>> without_password("redis://me:secret@box:6379/0?password=secret")
    'redis://box:6379/0'
    >>> without_password("me:secret@box:6379")
    'box:6379'
    """
    before, separator, after = url.partition("?")[0].rpartition("://")
    return before + separator + after.rpartition("@")[2]


def _numbers_by_value(name: str) -> list[str | int]:
    # Text and numbers alternate, so that only items of one type are compared.
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdecimal() else part for part in parts]


# Packages that only some users need.


def require_extra(what: str, package: str, extra: str | None = None) -> None:
    """Check that a package of an extra is installed, without importing it.

    Args:
        what: Subject of the message, e.g. "TensorBoard".
        package: Name of the package to import.
        extra: Name of the extra; by default that of the package.

    Raises:
        UsageError: If the package is missing.
    """
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"{what} needs another package: pip install 'edgegossip[{extra or package}]'"
        )
