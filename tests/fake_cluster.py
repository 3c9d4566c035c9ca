"""A Ray session without Ray: desks in this process, and losses by the seed."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from edgegossip.cluster.learners_desk import LearnersDesk, Order, Reply
from edgegossip.cluster.ray_pool import RayPool
from edgegossip.cluster.ray_session import ClusterNode, LostError, RaySession
from edgegossip.experiments.describe import versions

# Desks catch warnings, which one thread at a time may do.
_ONE_AT_A_TIME = threading.Lock()


class FakeDesk:
    """A desk that is as far away as in another process: nothing that is sent is shared.

    Args:
        session: Says when it is lost.
        node: Where it is.
    """

    def __init__(self, session: FakeSession, node: ClusterNode) -> None:
        self.session = session
        self.node = node
        self.desk = LearnersDesk(lambda maker: maker)
        self.num_learners = 0
        self.is_lost = False

    def versions(self) -> dict[str, str]:
        if self.session.refuses or self.node not in self.session.there:
            raise LostError("no actor can be had here")
        return self.session.versions

    def work(
        self, forgotten: Sequence[int], orders: Sequence[Order]
    ) -> Callable[[], list[Reply]]:
        sent = [replace(order, state=copy.deepcopy(order.state)) for order in orders]
        return lambda: self._replies(forgotten, sent)

    def _replies(self, forgotten: Sequence[int], orders: Sequence[Order]) -> list[Reply]:
        with _ONE_AT_A_TIME:
            self._require_not_lost()
            replies = copy.deepcopy(self.desk.work(forgotten, orders))
            self.num_learners = len(self.desk._trainers)
            self.session.num_orders += len(orders)
            self._require_not_lost()  # the work was done, and nobody will know
            return replies

    def _require_not_lost(self) -> None:
        chance = self.session.random.random()
        self.is_lost |= chance < self.session.loss_probability
        if self.is_lost or self.node not in self.session.there:
            self.session.num_losses += 1
            raise LostError("it was killed")

    def close(self) -> None:
        self.is_lost = True


class FakeSession:
    """A cluster of nodes with one core each.

    Args:
        num_nodes: Nodes at first.
        loss_probability: How likely an actor is lost before a piece of work, and after it.
        seed: Says when.
    """

    def __init__(
        self, num_nodes: int = 2, loss_probability: float = 0.0, seed: int = 0
    ) -> None:
        self.there = [ClusterNode(str(n), f"host-{n}", 1) for n in range(num_nodes)]
        self.loss_probability = loss_probability
        self.random = random.Random(seed)
        self.versions = versions()
        self.refuses = False
        self.is_open = True
        self.num_losses = 0
        self.num_orders = 0
        self.desks: list[FakeDesk] = []

    def nodes(self) -> list[ClusterNode]:
        return [*self.there]

    def put(self, value: object) -> object:
        return value

    def open_desk(self, node: ClusterNode) -> FakeDesk:
        self.desks.append(FakeDesk(self, node))
        return self.desks[-1]

    def close(self) -> None:
        self.is_open = False

    def pool(self, min_seconds: float = 0.0) -> RayPool:
        """A pool on this cluster; sends all work, however small."""
        opened = cast("RaySession", self)
        return RayPool(min_seconds=min_seconds, open_session=lambda address, number: opened)
