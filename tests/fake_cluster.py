"""A Ray session without Ray: desks in this process, and losses by the seed."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from edgegossip.integrations.ray.learners_desk import LearnersDesk, Order, Reply
from edgegossip.integrations.ray.ray_pool import RayPool
from edgegossip.integrations.ray_session import ClusterNode, LostError, RaySession
from edgegossip.runs.describe import versions

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
            self._require_not_lost(orders)
            replies = copy.deepcopy(self.desk.work(forgotten, orders))
            self.num_learners = len(self.desk._trainers)
            self.session.num_orders += len(orders)
            self._require_not_lost(orders)  # the work was done, and nobody will know
            self.session.unlucky.difference_update(order.serial for order in orders)
            return replies

    def _require_not_lost(self, orders: Sequence[Order]) -> None:
        session, serials = self.session, {order.serial for order in orders}
        # Nothing is lost twice in a row by chance alone: five times would end the run.
        is_spared = session.loss_probability < 1 and bool(session.unlucky & serials)
        self.is_lost |= not is_spared and next(session.losses)
        if self.is_lost or self.node not in session.there:
            session.num_losses += 1
            session.unlucky |= serials
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
        self.losses = self._losses(random.Random(seed))
        self.versions = versions()
        self.refuses = False
        self.is_open = True
        self.num_losses = 0
        self.unlucky: set[int] = set()
        self.num_orders = 0
        self.desks: list[FakeDesk] = []

    def _losses(self, chance: random.Random) -> Iterator[bool]:
        first = chance.randrange(8)  # so that there is one, in whatever order threads run
        for number in itertools.count():
            is_lost = number == first or chance.random() < self.loss_probability
            yield self.loss_probability > 0 and is_lost

    def nodes(self) -> list[ClusterNode]:
        return [*self.there]

    def put(self, value: object) -> object:
        return value

    def open_desk(self, node: ClusterNode) -> FakeDesk:
        self.desks.append(FakeDesk(self, node))
        return self.desks[-1]

    def close(self) -> None:
        self.is_open = False

    def pool(self, min_seconds: float = 0.0, num_actors: int | None = None) -> RayPool:
        """A pool on this cluster; sends all work, however small."""
        opened = cast("RaySession", self)
        return RayPool(
            None,
            num_actors,
            min_seconds=min_seconds,
            open_session=lambda address, number: opened,
        )
