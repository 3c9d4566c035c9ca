"""Links between the executors of one worker: messages of the lead, and sums over all."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import distributed_c10d as dist

from edgegossip.contract.protocol import Seconds
from edgegossip.contract.snapshot import assemble, dismantle

LOOPBACK = "127.0.0.1"
_ENDED = "its process has ended"
_LOOKING: Seconds = 0.05
"""Longest time for which a process looks for the end of a sum instead of sleeping."""
Message: TypeAlias = dict[str, Any]
"""Plain values and tensors, by name."""


# Not on every system.
_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class ExecutorLostError(Exception):
    """An executor does not take part; the others can go on without it."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a process among the executors of one worker.

    Attributes:
        index: Index of the executor; 0 is the lead, which is the worker itself.
        number: Number of executors.
        store: Store of torch.distributed, in which the lead leaves its address.
        host: Name at which the other executors reach the lead's machine.
    """

    index: int
    number: int
    store: dist.Store
    host: str = LOOPBACK


class Link:
    """Messages between the lead and another executor.

    Args:
        connection: Connected TCP socket, which this object closes.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(connection.detach())

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            ExecutorLostError: If the other end has closed the connection.
        """
        plain, tensors = dismantle(message)
        try:
            self._connection.send_bytes(
                json.dumps(plain).encode() + b"\n" + safetensors.torch.save(tensors)
            )
        except OSError as error:
            raise ExecutorLostError(_ENDED) from error

    def receive(self, patience: Seconds | None = None) -> Message:
        """Wait for a message; None waits as long as the connection lives.

        Raises:
            ExecutorLostError: If the connection is closed, or nothing that is a message arrives
                in time.
        """
        try:
            if not self._connection.poll(patience):
                raise ExecutorLostError(f"it has not answered for {patience:g} s")
            head, _, body = self._connection.recv_bytes().partition(b"\n")
            message = assemble(json.loads(head), safetensors.torch.load(body))
            if not isinstance(message, dict):
                raise TypeError(f"{message!r:.60}")
        except (OSError, EOFError) as error:
            raise ExecutorLostError(_ENDED) from error
        except (ValueError, LookupError, TypeError, SafetensorError) as error:
            raise ExecutorLostError(f"it has sent what is no message ({error})") from error
        return message

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Group:
    """Executors that add up vectors, with torch.distributed.

    One all-reduce of a flat gradient replaces `DistributedDataParallel`: that averages with
    equal weights, and would have to be made anew after each lost executor.

    Args:
        store: Where the members find each other; used by this group alone.
        position: Position of this member; 0 is the lead's.
        size: Number of members.
        backend: "nccl", for members with a GPU each, or "gloo".
        is_local: Whether all members run on this machine.
        patience: Seconds to wait for a member.

    Raises:
        ExecutorLostError: If a member does not join.
    """

    def __init__(
        self,
        store: dist.Store,
        position: int,
        size: int,
        *,
        backend: str,
        is_local: bool,
        patience: Seconds,
    ) -> None:
        self.position, self.size, self.backend = position, size, backend
        options: Any
        try:
            if backend == "nccl":
                # By default, a watchdog ends the whole process when a member is lost.
                os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
                os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=patience)
                self._group: Any = dist.ProcessGroupNCCL(store, position, size, options)
            else:
                make: Any = dist.ProcessGroupGloo
                options = make._Options()
                options._timeout = timedelta(seconds=patience)
                # By default, gloo listens at the address of this machine's name.
                options._devices = [
                    make.create_device(hostname=LOOPBACK)
                    if is_local
                    else make.create_default_device()
                ]
                self._group = make(store, position, size, options)
        except RuntimeError as error:
            raise ExecutorLostError(f"no group was formed ({error!s:.200})") from error

    def add_up(self, values: Tensor) -> None:
        """Replace `values` by their sum over all members, with the same bits everywhere.

        Raises:
            ExecutorLostError: If a member is lost.
        """
        self._wait(lambda: self._group.allreduce([values]))

    def spread(self, values: Tensor) -> None:
        """Replace `values` by those of the lead.

        Raises:
            ExecutorLostError: If a member is lost.
        """
        self._wait(lambda: self._group.broadcast(values, 0))

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            work = begin()
            if self.backend == "gloo":
                # A core that sleeps takes up to milliseconds to wake, which is long for a step.
                # Others who need the core get it with each look.
                until = time.perf_counter() + _LOOKING
                while not work.is_completed() and time.perf_counter() < until:
                    _give_way()
            work.wait()
        except RuntimeError as error:
            raise ExecutorLostError(f"a sum has failed ({error!s:.200})") from error

    def close(self) -> None:
        """Leave the group; members that wait for this one then fail at once."""
        group, self._group = self._group, None
        if hasattr(group, "abort"):  # for NCCL, and from torch 2.8 on for gloo
            group.abort()
