"""Processes of one `torch.distributed` group (gloo), in which a test runs a function."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from edgegossip.real.launch import free_ports


def in_processes(number: int, job: Callable[..., Any], *arguments: object) -> list[Any]:
    """Call ``job(rank, *arguments)`` in each process; returns what each returned or raised.

    They are forks of one that has imported the job's module. Tensors must not be returned,
    because a process that ends takes their memory with it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.nn.parallel", job.__module__])
    [port] = free_ports(1)
    ends = []
    for rank in range(number):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(theirs, rank, number, port, job, arguments), daemon=True
        )
        process.start()
        theirs.close()
        ends.append((process, ours))
    found = []
    for process, ours in ends:
        try:
            assert ours.poll(120), "a process hangs"
            found.append(ours.recv())
        except EOFError:
            process.join(20)
            found.append(f"process ended with {process.exitcode}")
    for process, _ in ends:
        process.join(20)
        assert not process.is_alive(), "a process does not end"
    return found


def _run(
    result: Connection,
    rank: int,
    number: int,
    port: int,
    job: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=number)
    try:
        found = job(rank, *arguments)
    except BaseException as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    result.send(found)
    result.close()
