"""A zenoh session that tells of links as a test says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import zenoh


class Session:
    """As far as links are followed: says what its listener is to be told."""

    def __init__(self) -> None:
        self.info = self
        self._tell: Callable[[Any], None]

    def declare_link_events_listener(
        self, handler: zenoh.handlers.Callback[Any], *, history: bool
    ) -> None:
        assert history
        self._tell = handler.callback

    def open(self, session_id: str, ends: tuple[str, str]) -> None:
        self._event(zenoh.SampleKind.PUT, session_id, ends)

    def close(self, session_id: str, ends: tuple[str, str]) -> None:
        self._event(zenoh.SampleKind.DELETE, session_id, ends)

    def _event(self, kind: object, session_id: str, ends: tuple[str, str]) -> None:
        link = SimpleNamespace(zid=session_id, src=ends[0], dst=ends[1])
        self._tell(SimpleNamespace(kind=kind, link=link))
