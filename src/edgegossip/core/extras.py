"""Packages that only some users need."""

from __future__ import annotations

import importlib.util

from edgegossip.core.errors import UsageError


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
