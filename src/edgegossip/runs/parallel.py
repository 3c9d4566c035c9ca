"""Parallel pieces of work, each in its own process.

A run of small models keeps only one core busy: it spends much of its time between kernels,
where threads wait for each other. With one process per core, every core carries out a run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self, TypeVar

from torch import multiprocessing

from edgegossip.contract.errors import TrainingError, UsageError
from edgegossip.machine.system import leave_terminal
from edgegossip.runs.process import interrupt, on_stop_signal
from edgegossip.runs.tracking import Progress, Status

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_END_SECONDS = 10.0
_NOT_PASSED_ON = ("can't pickle", "cannot pickle", "can't get local object")
"""How messages of Python begin if work cannot be passed to another process."""
# In a child process: the queue of reports to its parent, and whether it was asked to stop.
_statuses: Any = None
_is_asked = False


class MovableWork(Protocol[T_co]):
    """Work that writes to its own folder."""

    @property
    def folder(self) -> Path:
        """The folder."""

    def moved(self, folder: Path) -> Self:
        """The same work with another folder."""

    def __call__(self, progress: Progress) -> T_co:
        """Carry out the work; return its result."""


class AtOnce(Protocol):
    """Carries out jobs in parallel: as `do_at_once` does, or on other machines."""

    def __call__(
        self,
        jobs: Mapping[str, Callable[[], MovableWork[T]]],
        after: Mapping[str, Collection[str]],
        *,
        progress: Progress,
    ) -> Generator[tuple[str, Future[T]]]:
        """Run all jobs; yield each finished job."""


class _Reports:
    """A live view in a child process, which passes reports to its parent."""

    def update(self, status: Status) -> None:
        _statuses.put(status)


def do_at_once(
    jobs: Mapping[str, Callable[[], Callable[[Progress], T]]],
    after: Mapping[str, Collection[str]],
    *,
    num_processes: int,
    progress: Progress,
) -> Generator[tuple[str, Future[T]]]:
    """Run all jobs, one per process at a time; yield each finished job.

    Close the generator early to stop all processes.

    Args:
        jobs: Jobs by name; each makes its work when it can begin. The work is pickled, with its
            tensors in shared memory, and is called with a live view.
        after: Names of the prerequisites of each job; unknown names are ignored.
        num_processes: Number of processes, at least 1.
        progress: Live view of all processes.

    Raises:
        KeyboardInterrupt: After Ctrl+C, SIGTERM or SIGHUP, once all processes have stopped.
        TrainingError: If a process was killed.
        UsageError: If a job's work cannot be pickled.
    """
    remaining, running = dict(jobs), dict[Future[T], str]()
    with _processes(num_processes, progress) as executor:
        try:
            while remaining or running:
                for name in ready(remaining, running.values(), after, num_processes):
                    work = remaining.pop(name)()
                    running[executor.submit(_do, work)] = name
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(future)
                    _check(name, future.exception())
                    yield name, future
        except BaseException:
            _ask_to_stop(executor)
            wait(running)
            raise


def _check(name: str, error: BaseException | None) -> None:
    """Raise a clear error if a process was killed, or could not be given its work."""
    if isinstance(error, BrokenProcessPool):
        raise TrainingError(
            f"a process was killed during {name}, perhaps because memory ran out; try fewer "
            "--processes, and --resume"
        )
    if str(error).lower().startswith(_NOT_PASSED_ON):
        raise UsageError(
            f"{name} cannot be passed to another process ({error}); define its model and other "
            "functions at the top of a module, not as a lambda or within a function, or run "
            "everything in one process"
        ) from None


def ready(
    remaining: Collection[str],
    running: Collection[str],
    after: Mapping[str, Collection[str]],
    limit: int,
) -> list[str]:
    """The jobs that can begin: their prerequisites have ended, and at most `limit` run.

    >>> ready(["b", "c", "d"], ["a"], {"b": ["a"], "c": [], "d": ["unknown"]}, limit=2)
    ['c']
    """
    waiting = {*remaining, *running}
    found = [name for name in remaining if waiting.isdisjoint(after[name])]
    return found[: max(0, limit - len(running))]


@contextmanager
def _processes(number: int, progress: Progress) -> Iterator[ProcessPoolExecutor]:
    """Start processes, show their reports, and stop the processes when the block ends."""
    context = multiprocessing.get_context("spawn")
    statuses = context.SimpleQueue()
    viewer = threading.Thread(target=_show, args=(statuses, progress), daemon=True)
    viewer.start()
    executor = ProcessPoolExecutor(
        number, mp_context=context, initializer=_begin, initargs=(statuses,)
    )
    try:
        with on_stop_signal(interrupt):
            yield executor
    except BaseException:
        _end(executor)
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        statuses.put(None)
        viewer.join()


def _ask_to_stop(executor: ProcessPoolExecutor) -> None:
    """Ask each process to stop, but only once; asked twice, it would leave no checkpoint."""
    if executor._broken:  # a broken executor has asked them itself
        return
    for pid in [*(executor._processes or {})]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _end(executor: ProcessPoolExecutor) -> None:
    """Wait for processes that have been asked to stop, then kill the remaining ones.

    A process may wait forever for a lock that a killed process held.
    """
    processes = [*(executor._processes or {}).values()]
    executor.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + _END_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()


def _show(statuses: Any, progress: Progress) -> None:  # noqa: ANN401
    while (status := statuses.get()) is not None:
        progress.update(status)


def _begin(statuses: Any) -> None:  # noqa: ANN401
    """Prepare a child that Ctrl+C does not reach and that, on Linux, dies with its parent."""
    global _statuses
    _statuses = statuses
    # An idle process killed by SIGTERM would keep the lock of the queue that all wait on.
    signal.signal(signal.SIGTERM, _be_asked)
    leave_terminal()


def _be_asked(number: int, frame: FrameType | None) -> None:
    """Refuse further work."""
    global _is_asked
    _is_asked = True


def _do(work: Callable[[Progress], T]) -> T:
    with on_stop_signal(interrupt):
        if _is_asked:
            raise KeyboardInterrupt
        return work(_Reports())
