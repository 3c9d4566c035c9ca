"""The executors of one worker, as their lead sees them."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from edgegossip.contract.protocol import Seconds
from edgegossip.training.executors.links import (
    LOOPBACK,
    ExecutorLostError,
    Group,
    Link,
    Message,
    Place,
)

_LOG = logging.getLogger("edgegossip.training")
PATIENCE: Seconds = 60.0
"""Seconds after which an executor that does not take part counts as lost."""
STARTING: Seconds = 300.0
"""Seconds for the start of an executor: boards may import torch and load data for minutes."""
ADDRESS = "lead"
"""Key of the lead's address in the store."""
_MEMORY = 31
"""Steps of whose times an executor's speed is the median."""
_UNEVEN = 0.1
"""By how much a step may be longer than with the best shares before these are changed. Kernels
are prepared for each new size of a share, so sizes must not follow noise."""


def divide(number: int, speeds: Sequence[float]) -> list[int]:
    """Divide samples in proportion to speeds, with none or at least two for each executor.

    Batch normalization cannot train on a single sample.

    Args:
        number: Number of samples, at least 1.
        speeds: Samples per second of each executor, above 0.

    >>> divide(64, [1.0, 1.0]), divide(10, [3.0, 1.0, 1.0]), divide(3, [1.0, 2.0])
    ([32, 32], [6, 2, 2], [0, 3])
    """
    by_speed = sorted(range(len(speeds)), key=lambda index: -speeds[index])
    chosen = by_speed[: max(1, number // 2)]
    least = min(2, number)
    total = sum(speeds[index] for index in chosen)
    sizes = [0] * len(speeds)
    for index in chosen:
        sizes[index] = max(least, int(number * speeds[index] / total))
    while sum(sizes) < number:
        # The executor that would end first with one sample more; equal ones in order.
        sizes[min(chosen, key=lambda each: (sizes[each] + 1) / speeds[each])] += 1
    while sum(sizes) > number:
        reducible = [each for each in chosen if sizes[each] > least]
        sizes[max(reducible, key=lambda each: sizes[each] / speeds[each])] -= 1
    return sizes


class Executors:
    """The executors that train one worker's batches; the lead, executor 0, is this process.

    An executor whose process has ended, or that does not take part for `patience`, is lost: the
    others form a new group, and a warning tells it.

    Args:
        place: Place of the lead.
        torch_device: Device of the lead.
        patience: Seconds to wait for an executor in a step.
        starting: Seconds to wait for an executor's start.
        may_start: Whether the executor with an index may still start.

    Attributes:
        members: Indices of the living executors, in order, the lead's first.
        num_samples: Number of samples that each executor has trained on, by index.
        generation: Number of groups that were formed.
        process_ids: The other executors' processes on this machine.
        follows: The learner whose optimizer state all members have; None after a change.
    """

    def __init__(
        self,
        place: Place,
        torch_device: torch.device,
        *,
        patience: Seconds = PATIENCE,
        starting: Seconds = STARTING,
        may_start: Callable[[int], bool] = lambda index: True,
    ) -> None:
        self.members = [*range(place.number)]
        self.num_samples = [0] * place.number
        self.generation = 0
        self.process_ids: tuple[int, ...] = ()
        self.follows: object = None
        self._place = place
        self._patience = patience
        self._links: dict[int, Link] = {}
        self._group: Group | None = None
        self._times = {index: deque[Seconds](maxlen=_MEMORY) for index in self.members}
        self._used: dict[int, float] = dict.fromkeys(self.members, 1.0)
        self.backend = self._meet(torch_device, starting, may_start)
        self._form()

    # The start.

    @property
    def _is_local(self) -> bool:
        return self._place.host == LOOPBACK

    def _meet(
        self, torch_device: torch.device, starting: Seconds, may_start: Callable[[int], bool]
    ) -> str:
        """Wait for the other executors; return the backend of their groups."""
        here = (socket.gethostname(), name_of(torch_device))
        places = {0: here}
        deadline = time.monotonic() + starting
        with socket.create_server((LOOPBACK if self._is_local else "", 0)) as server:
            server.settimeout(0.1)
            address = f"{self._place.host}:{server.getsockname()[1]}"
            self._place.store.set(ADDRESS, address)
            while absent := [index for index in self.members if index not in places]:
                for index in absent:
                    if not may_start(index):
                        self._lose(index, "its process ended while it started")
                    elif time.monotonic() > deadline:
                        self._lose(index, f"it did not start within {starting:g} s")
                try:
                    link = Link(server.accept()[0])
                    hello = link.receive(self._patience)
                except (TimeoutError, ExecutorLostError):
                    continue
                index = int(hello.get("index", -1))
                if index in absent:
                    self._links[index] = link
                    places[index] = (hello["machine"], hello["torch_device"])
                    if hello["machine"] == here[0]:
                        self.process_ids += (hello["process"],)
        on_gpus = all(device.startswith("cuda") for _, device in places.values())
        # NCCL gives a GPU to one member only.
        return "nccl" if on_gpus and len({*places.values()}) == len(places) else "gloo"

    def _lose(self, index: int, reason: object) -> None:
        self.members = [each for each in self.members if each != index]
        if index in self._links:
            self._links.pop(index).close()
        number = len(self.members)
        left = "one executor" if number == 1 else f"{number} executors"
        _LOG.warning("executor %d is lost: %s - training goes on with %s", index, reason, left)

    # Groups.

    def form_again(self, error: ExecutorLostError) -> None:
        """After a failed step, form a group of the executors that still answer."""
        before = self.members
        self._form()
        if self.members == before:
            _LOG.warning("a step failed and is repeated: %s", error)

    def _form(self) -> None:
        self.follows = None
        for _ in range(len(self.members)):  # an executor is lost in all attempts but the last
            self._leave_group()
            self.generation += 1
            for index in self.members[1:]:
                try:
                    self._links[index].send({"kind": "regroup", "generation": self.generation})
                except ExecutorLostError as error:
                    self._lose(index, error)
            for index in self.members[1:]:
                try:
                    self._await_ready(self._links[index])
                except ExecutorLostError as error:
                    self._lose(index, error)
            if len(self.members) == 1:
                return
            try:
                self._group = self._join()
            except ExecutorLostError:
                continue
            return
        for index in self.members[1:]:
            self._lose(index, "no group could be formed")

    def _leave_group(self) -> None:
        if self._group is not None:
            # Executors that wait for others in this group fail, and listen again.
            self._group.close()
            self._group = None

    def _await_ready(self, link: Link) -> None:
        while True:
            answer = link.receive(self._patience)
            # Others are answers to the step that has failed.
            if answer["kind"] == "ready" and answer["generation"] == self.generation:
                return

    def _join(self) -> Group:
        size = len(self.members)
        known = {"size": size, "backend": self.backend, "is_local": self._is_local}
        for position, index in enumerate(self.members[1:], start=1):
            self._links[index].send(
                {"kind": "group", "generation": self.generation, "position": position, **known}
            )
        store = PrefixStore(f"group {self.generation}", self._place.store)
        return Group(
            store,
            0,
            size,
            backend=self.backend,
            is_local=self._is_local,
            patience=self._patience,
        )

    # Steps.

    def send(self, messages: Sequence[Message]) -> None:
        """Send a message to each other member, in their order.

        Raises:
            ExecutorLostError: If a member is lost.
        """
        for index, message in zip(self.members[1:], messages, strict=True):
            self._links[index].send(message)

    def answers(self) -> list[Message]:
        """Receive a message from each other member, in their order.

        Raises:
            ExecutorLostError: If a member is lost.
        """
        return [self._links[index].receive(self._patience) for index in self.members[1:]]

    def add_up(self, values: Tensor) -> None:
        """Replace `values` by their sum over all members.

        Raises:
            ExecutorLostError: If a member is lost.
        """
        assert self._group is not None
        self._group.add_up(values)

    def spread(self, values: Tensor) -> None:
        """Give `values` to all members.

        Raises:
            ExecutorLostError: If a member is lost.
        """
        assert self._group is not None
        self._group.spread(values)

    def shares(self, number: int) -> list[int]:
        """Numbers of samples of a batch for each member, by their speeds."""
        return divide(number, [self._used[index] for index in self.members])

    def trained(self, sizes: Sequence[int]) -> None:
        """Count the samples of a step."""
        for index, size in zip(self.members, sizes, strict=True):
            self.num_samples[index] += size

    def timed(self, sizes: Sequence[int], seconds: Sequence[Seconds]) -> None:
        """Learn the speeds from the times that the members computed in a step."""
        for index, size, time_ in zip(self.members, sizes, seconds, strict=True):
            if size and time_ > 0:
                self._times[index].append(time_ / size)
        if min(len(self._times[index]) for index in self.members) < _MEMORY // 4:
            return
        speeds = {index: 1 / statistics.median(self._times[index]) for index in self.members}
        even = dict.fromkeys(self.members, 1.0)
        for used in (even, self._used, speeds):
            # The time of a step that is divided like this, over the shortest possible time.
            ratios = [used[index] / speeds[index] for index in self.members]
            total = sum(used[index] for index in self.members)
            if max(ratios) * sum(speeds.values()) / total <= 1 + _UNEVEN:
                self._used = {**self._used, **used}
                return

    def close(self) -> None:
        """Let all other executors end."""
        self._leave_group()
        for link in self._links.values():
            link.close()
        self._links.clear()


def name_of(torch_device: torch.device) -> str:
    """Name of a device, with the index of a GPU."""
    if torch_device.type == "cuda" and torch_device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(torch_device)
