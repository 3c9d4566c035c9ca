"""The search of a parameter server, read from its state."""

from __future__ import annotations

from edgegossip.algorithms.parameter_server.adsp import SearchingServerState
from edgegossip.algorithms.parameter_server.commit_search import Tried
from edgegossip.algorithms.parameter_server.sharing import SharingState
from edgegossip.core.protocol import WorkerState


def trials(state: WorkerState) -> list[Tried]:
    """The windows of a run's search; none for a state of anything but ADSP's server."""
    server = state.inner if isinstance(state, SharingState) else state
    return server.search.tried if isinstance(server, SearchingServerState) else []
