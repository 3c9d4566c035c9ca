"""Several pieces of work at once, each in a process of its own.

A run of small models keeps one core busy and no more: much of its time is spent between two
kernels, where threads wait for each other. As many processes as cores do as many runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from torch import multiprocessing

from edgegossip.core.errors import TrainingError
from edgegossip.experiments.progress import Progress, Status
from edgegossip.experiments.signals import interrupt, on_stop_signal

T = TypeVar("T")
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_statuses: Any = None  # of a child: what it tells its parent


class _Told:
    """A live view of a child, which tells its parent."""

    def update(self, status: Status) -> None:
        _statuses.put(status)


def do_at_once(
    jobs: Mapping[str, Callable[[], Callable[[Progress], T]]],
    after: Mapping[str, Collection[str]],
    *,
    num_processes: int,
    progress: Progress,
) -> Generator[tuple[str, Future[T]]]:
    """Do all jobs, as many at a time as there are processes; gives each as it is done.

    Close it to stop all processes before the end.

    Args:
        jobs: By name; each makes the work when it can begin. Work is pickled, and gets a live
            view. Tensors in it are put into memory that all processes share.
        after: Names of the jobs that have to be done before, for each job; those that are no
            jobs do not count.
        num_processes: At least 1.
        progress: Where live views of all processes come together.

    Raises:
        KeyboardInterrupt: After Ctrl+C, SIGTERM or SIGHUP, once all processes have stopped.
        TrainingError: If a process was killed.
    """
    remaining, running = dict(jobs), dict[Future[T], str]()
    with _processes(num_processes, progress) as executor:
        while remaining or running:
            waiting = {*remaining, *running.values()}
            for name in [*remaining]:
                if len(running) < num_processes and waiting.isdisjoint(after[name]):
                    work = remaining.pop(name)()
                    running[executor.submit(_do, work)] = name
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    raise TrainingError(
                        f"a process was killed while it did {name}, perhaps for want of "
                        "memory; try fewer --processes, and --resume"
                    )
                yield name, future


@contextmanager
def _processes(number: int, progress: Progress) -> Iterator[ProcessPoolExecutor]:
    """Start processes, show what they tell, and stop them when this one is stopped."""
    context = multiprocessing.get_context("spawn")
    statuses = context.SimpleQueue()
    told = threading.Thread(target=_show, args=(statuses, progress), daemon=True)
    told.start()
    executor = ProcessPoolExecutor(
        number, mp_context=context, initializer=_begin, initargs=(statuses,)
    )
    try:
        with on_stop_signal(interrupt):
            yield executor
    except BaseException:
        _stop(executor)  # once: a second time would insist, and cost them their checkpoints
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        statuses.put(None)
        told.join()


def _stop(executor: ProcessPoolExecutor) -> None:
    """Ask all processes to leave valid folders and end."""
    for pid in [*(executor._processes or {})]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _show(statuses: Any, progress: Progress) -> None:  # noqa: ANN401
    while (status := statuses.get()) is not None:
        progress.update(status)


def _begin(statuses: Any) -> None:  # noqa: ANN401
    """Get a child ready: its parent alone is told of Ctrl+C, and takes it along at its end."""
    global _statuses
    _statuses = statuses
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)


def _do(work: Callable[[Progress], T]) -> T:
    return work(_Told())
