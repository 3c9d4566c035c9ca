"""A thread that reads or trains handles what it brings, if the host's own has nothing to do."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from tests.algorithms import NUM_WORKERS
from tests.host_wrappers import Inside
from tests.hosts import EPOCHS, make_host
from tests.observers import Silent
from tests.parity import SETTINGS

from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    Trained,
    WorkerState,
)
from edgegossip.net.host import host as module
from edgegossip.net.host.host import Host
from edgegossip.net.host.receiving import Appeared, Disappeared, Interrupted
from edgegossip.net.host.work import Completed
from edgegossip.net.memory import MemoryNetwork, MemoryTransport
from edgegossip.net.runtime import FairQueue


@dataclass
class Noting(Inside):
    """Notes which threads handle events, by the first word of their name."""

    threads: Counter[tuple[str, type[Event]]] = field(default_factory=Counter)
    seconds: Seconds = 0.0
    fails_in: str = ""
    is_inside: bool = False

    def handle(self, state: WorkerState, event: Event, now: Seconds) -> list[Effect]:
        thread = threading.current_thread().name.partition(" ")[0]
        assert not self.is_inside  # one thread at a time
        self.is_inside = True
        self.threads[thread, type(event)] += 1
        if thread == self.fails_in:
            raise ValueError("in another thread")
        if isinstance(event, Received):
            time.sleep(self.seconds)
        effects = super().handle(state, event, now)
        self.is_inside = False
        return effects


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The threads of the network do nothing but read."""

    def take(self: MemoryTransport, sender: Rank, frame: bytearray) -> None:
        self._calls.put(lambda: self._listener.read(sender, memoryview(frame))())

    with monkeypatch.context() as patch:
        patch.setattr(MemoryTransport, "take", take)
        yield


def run(notes: list[Noting]) -> list[str | BaseException]:
    network = MemoryNetwork()
    return run_all([make_host(note, rank, network) for rank, note in enumerate(notes)])


def run_all(hosts: list[Host[WorkerState]]) -> list[str | BaseException]:
    ends = list[str | BaseException]([""] * NUM_WORKERS)

    def one(rank: Rank) -> None:
        try:
            ends[rank] = hosts[rank].run()
        except ValueError as error:
            ends[rank] = error

    threads = [
        threading.Thread(target=one, args=(rank,), name=f"own {rank}")
        for rank in range(NUM_WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return ends


def test_threads_that_read_and_train_handle_what_they_bring() -> None:
    notes = [Noting(EPOCHS) for _ in range(NUM_WORKERS)]
    assert run(notes) == ["finished"] * NUM_WORKERS
    total = sum((note.threads for note in notes), Counter[tuple[str, type[Event]]]())
    assert total["receive", Received]
    assert total["train", Trained]
    assert {thread for thread, _ in total} == {"own", "receive", "train"}


def test_checkpoints_stay_with_the_hosts_own_threads() -> None:
    threads, network = Counter[str](), MemoryNetwork()

    def save(checkpoint: object) -> bool:
        threads[threading.current_thread().name.partition(" ")[0]] += 1
        return True

    settings = replace(SETTINGS, checkpoint_seconds=0.001)
    algorithm = replace(EPOCHS, num_rounds=60)
    make = partial(make_host, algorithm, network=network, save=save, settings=settings)
    ends = run_all([make(rank) for rank in range(NUM_WORKERS)])
    assert ends == ["finished"] * NUM_WORKERS
    assert threads.keys() == {"own"}


def test_an_error_in_another_thread_ends_the_host() -> None:
    notes = [Noting(EPOCHS) for _ in range(NUM_WORKERS)]
    notes[0].fails_in = "receive"
    first, *others = run(notes)
    assert str(first) == "in another thread"
    assert others == ["finished"] * (NUM_WORKERS - 1)


def test_a_thread_that_reads_is_kept_by_few_messages_that_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LONG", 0.005)
    notes = [Noting(EPOCHS, seconds=0.01) for _ in range(NUM_WORKERS)]
    assert run(notes) == ["finished"] * NUM_WORKERS
    assert all(note.threads["receive", Received] == 0 for note in notes)


@dataclass
class Sends(Silent):
    """Keeps the times of the messages that each worker has sent, by worker and round."""

    times: defaultdict[tuple[Rank, int], list[Seconds]] = field(
        default_factory=lambda: defaultdict(list)
    )
    is_inside: bool = False

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        num_bytes: int,
        uplink: tuple[Seconds, Seconds],
    ) -> None:
        assert not self.is_inside  # one thread at a time
        self.is_inside = True
        assert now <= uplink[0] <= uplink[1]
        self.times[rank, message.round].append(now)
        self.is_inside = False


def test_nobody_wakes_to_tell_the_observer_what_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put, kinds = FairQueue.put, Counter[type]()

    def counted(self: FairQueue, item: object) -> None:
        kinds[type(item)] += 1
        put(self, item)

    monkeypatch.setattr(FairQueue, "put", counted)
    network, observers = MemoryNetwork(), [Sends() for _ in range(NUM_WORKERS)]
    ends = run_all(
        [make_host(EPOCHS, rank, network, observer=each) for rank, each in enumerate(observers)]
    )
    assert ends == ["finished"] * NUM_WORKERS
    # Trainings come with `add`, like the frames here.
    assert kinds.keys() <= {Appeared, Disappeared, Interrupted, Completed}
    times = {key: found for each in observers for key, found in each.times.items()}
    # Each message once, and those of one event at its time, as in the simulator.
    assert len(times) == NUM_WORKERS * EPOCHS.num_rounds
    assert all(len(found) == NUM_WORKERS - 1 for found in times.values())
    assert all(len({*found}) == 1 for found in times.values())
