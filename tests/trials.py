"""The search of a parameter server, read from its state."""

from __future__ import annotations

from edgegossip.algorithms.server.adsp import SearchingServerState
from edgegossip.algorithms.server.commit_search import Tried
from edgegossip.algorithms.wrappers.shards.shard_server import ShardServerState
from edgegossip.contract.protocol import WorkerState


def trials(state: WorkerState) -> list[Tried]:
    """The windows of a run's search; none for a state of anything but ADSP's server."""
    server = state.inner if isinstance(state, ShardServerState) else state
    return server.search.tried if isinstance(server, SearchingServerState) else []
