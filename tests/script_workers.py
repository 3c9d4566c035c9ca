"""Scripts in threads: workers that train at the same time, over a network in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.script import ScriptWorker


def workers_in_threads(
    num_workers: int, train: Callable[[ScriptWorker], Any]
) -> list[BaseException | None]:
    """Let each worker train in a thread; says what each has raised."""
    network = MemoryNetwork()
    raised: list[BaseException | None] = [None] * num_workers

    def run(rank: int) -> None:
        try:
            train(
                ScriptWorker(
                    rank=rank, num_workers=num_workers, transport=network.transport(rank)
                )
            )
        except BaseException as error:
            raised[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return raised
