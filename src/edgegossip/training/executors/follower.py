"""An executor that follows the lead of its worker."""

from __future__ import annotations

import logging
import os
import socket
import time

import torch
from torch.distributed.distributed_c10d import PrefixStore

from edgegossip.contract.protocol import Seconds
from edgegossip.training.executors.lead import ADDRESS, PATIENCE, name_of
from edgegossip.training.executors.learners import FollowingLearner
from edgegossip.training.executors.links import ExecutorLostError, Group, Link, Message, Place

_LOG = logging.getLogger("edgegossip.training")


class Follower:
    """Does what the lead asks for.

    Args:
        learner: Trains the shares of this executor.
        place: Place of this executor.
        patience: Seconds to wait for another executor in a step.

    Raises:
        ExecutorLostError: If the lead does not meet its executors in time.
    """

    def __init__(
        self, learner: FollowingLearner, place: Place, patience: Seconds = PATIENCE
    ) -> None:
        self._learner = learner
        self._store = place.store
        self._patience = patience
        self._group: Group | None = None
        try:
            host, _, port = self._store.get(ADDRESS).decode().rpartition(":")
            self._link = Link(socket.create_connection((host, int(port)), patience))
        except (RuntimeError, OSError) as error:
            raise ExecutorLostError(f"the lead cannot be reached ({error!s:.200})") from error
        self._link.send(
            {
                "kind": "hello",
                "index": place.index,
                "process": os.getpid(),
                "machine": socket.gethostname(),
                "torch_device": name_of(torch.device(learner.settings.torch_device)),
            }
        )

    def run(self) -> None:
        """Follow until the lead ends, in whatever way."""
        while True:
            try:
                message = self._link.receive()
            except ExecutorLostError:
                return
            try:
                self._take(message)
            except ExecutorLostError as error:
                # Others that wait for this executor fail then, too, and the lead asks again.
                _LOG.debug("left the group: %s", error)
                self._leave_group()

    def close(self) -> None:
        """Leave; the lead then goes on without this executor."""
        self._leave_group()
        self._link.close()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _take(self, message: Message) -> None:
        started, group = time.perf_counter(), self._group
        match message["kind"]:
            case "regroup":
                self._leave_group()
                self._link.send({"kind": "ready", "generation": message["generation"]})
            case "group":
                self._group = Group(
                    PrefixStore(f"group {message['generation']}", self._store),
                    message["position"],
                    message["size"],
                    backend=message["backend"],
                    is_local=message["is_local"],
                    patience=self._patience,
                )
            # Without a group, the lead has not noticed yet that the last step has failed.
            case "begin" if group is not None:
                self._learner.begin(message, group)
            case "step" if group is not None:
                losses = self._learner.differentiate(message, group, started)
                if message["needs_losses"] or message["weights"] is not None:
                    self._link.send(losses)
                self._learner.conclude(group)
