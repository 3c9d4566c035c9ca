"""Warnings about files that cannot be written for a while."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("edgegossip.real")


class Lapse:
    """Warns once when something cannot be written, and says once when it can be again.

    Args:
        what: What training continues without, e.g. "a new checkpoint".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lasts = False

    def begin(self, reason: object) -> None:
        """Report a failed attempt, unless the last one failed, too."""
        if not self._lasts:
            _LOG.warning("%s - training continues without %s", reason, self._what)
        self._lasts = True

    def end(self) -> None:
        """Report a successful attempt if the last one failed."""
        if self._lasts:
            _LOG.info("there is room again for %s", self._what)
        self._lasts = False
