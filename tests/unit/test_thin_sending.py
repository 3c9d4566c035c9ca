"""Messages that wait on a slow link: few messages, none lost, and signs of life before them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.zenoh_workers import wait_until

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gosgd import _LARGEST, GoSGD
from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.codec import Buffer
from edgegossip.contract.metrics import ACCURACY
from edgegossip.contract.protocol import Message, Rank
from edgegossip.contract.topology import complete
from edgegossip.net.guard.envelope import Envelope, unpack
from edgegossip.net.host.peers import PLACEHOLDER, Peers
from edgegossip.net.host.receiving import connect
from edgegossip.net.host.sending import Sending
from edgegossip.net.host.settings import HostSettings
from edgegossip.net.host.status import STATUS, Phase, WorkerStatus
from edgegossip.net.runtime import FairQueue, RunClock
from edgegossip.net.transport import Progress
from edgegossip.real.best_model import BestByValidation
from edgegossip.runs.best import KeepBest
from edgegossip.runs.final_average import FinalAverage

SIZE = 1100  # above 4 kB


class SlowLink:
    """Takes pushes one by one, each only when it may, and all else at once."""

    credentials = None
    calls = ()

    def __init__(self) -> None:
        self.sent: list[tuple[Envelope, Message]] = []
        self.is_free = threading.Semaphore(0)
        self.has_begun = threading.Semaphore(0)

    def send(self, receiver: Rank, frame: Sequence[Buffer]) -> None:
        envelope, message = unpack(bytearray().join(frame))
        if message.payload.keys() == {"params"}:
            self.has_begun.release()
            assert self.is_free.acquire(timeout=10)
        self.sent.append((envelope, message))

    def begin(self, receiver: Rank, frame: Sequence[Buffer]) -> Progress:
        return Progress.NONE

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        raise AttributeError(name)


def status(**changes: Any) -> WorkerStatus:  # noqa: ANN401
    counts: dict[str, Any] = {"kept": 0, "left": 0, "sent": (0, 0), "received": (0, 0)}
    return WorkerStatus(
        **{
            "phase": Phase.RUNNING,
            "life": 5,
            "begun_with": 7,
            "elapsed": 1.0,
            "silence": 0.0,
            "is_resumed": False,
            "oldest": 1,
            **counts,
            **changes,
        }
    )


class Rig:
    """Worker 0 of two, which sends over a slow link, by default pushes of GoSGD."""

    def __init__(self, algorithm: Algorithm[Any] | None = None) -> None:
        self.link, self.peers = SlowLink(), Peers(0, 2, life=7, max_log_bytes=10**6)
        clock = RunClock(time.monotonic)
        algorithm = algorithm or GoSGD(topology=complete(2), num_rounds=50)
        settings = HostSettings(run=b"thinlink")
        link: Any = self.link
        self.sending: Sending
        self.sending, *_ = connect(
            algorithm, torch.zeros(SIZE), link, FairQueue(), self.peers, settings, clock
        )
        self.sending.phase = Phase.RUNNING
        self.appear(1)
        self.lose_link()  # before the run begins, which has no effect on it
        self.appear(1)
        self.peers.begin()

    def appear(self, incarnation: int) -> None:
        self.peers.appeared(1, incarnation)
        self.sending.appeared(1, incarnation)
        self.peers.told(1, status(), 0.0)

    def lose_link(self) -> None:
        self.sending.link_ended(1)
        self.sending.disappeared(1, 1)
        self.peers.disappeared(1, 1, 0.0)

    def report(self, received: int) -> None:
        """Receive the other's report of what has arrived."""
        self.peers.told(1, status(received=(received, 0)), 0.0)
        self.sending.reported(1)
        self.sending.release(0.0)

    def push(self, value: float, weight: float, round: int = 0) -> bool:
        payload = {"params": torch.full((SIZE,), value)}
        return self.sending.send(1, Message("push", round, payload, {"weight": weight}))

    def model(self, exchange: int, kind: str = "params") -> bool:
        """Send a model of `EpochGossip`."""
        payload = {"params": torch.full((SIZE,), float(exchange))}
        return self.sending.send(1, Message(kind, exchange, payload))

    def arrivals(self, number: int) -> list[tuple[int, str, int]]:
        """Number, kind and round of the first messages that leave, one of which is a model."""
        self.link.is_free.release()
        deadline = time.monotonic() + 10
        while len(found := [s for s in self.link.sent if s[0].number]) < number:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return [(envelope.number, m.kind, m.round) for envelope, m in found]

    def told(self) -> WorkerStatus:
        """The last status that has left."""
        *_, last = [message for _, message in self.link.sent if message.kind == STATUS]
        return WorkerStatus.parse(last)

    def pushes(self, number: int) -> list[tuple[Any, ...]]:
        """Number, value and weight of the first pushes that leave."""
        for _ in range(number):
            self.link.is_free.release()
        deadline = time.monotonic() + 10
        while len(found := [s for s in self.link.sent if s[1].kind == "push"]) < number:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return [
            (envelope.number, float(m.payload["params"][0]), float(m.numbers["weight"]))
            for envelope, m in found
        ]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for _ in range(100):
        rig.link.is_free.release()
    rig.sending.close(10.0)


def test_pushes_that_wait_become_one_without_a_gap_or_a_loss_of_weight(rig: Rig) -> None:
    assert rig.push(1.0, 0.25)
    assert rig.link.has_begun.acquire(timeout=10)
    for count in range(10):
        assert rig.push(2.0 + count, 0.02, round=count)
    assert max(rig.sending.outbox.waiting.values()) < 2.2 * 4 * SIZE
    assert rig.peers[1].sent == 2
    [(_, kept), (number, joined)] = rig.peers[1].log.entries
    assert (number, joined.round) == (2, 9)
    assert kept.numbers["weight"] == 0.25
    first, second = rig.pushes(2)
    assert first == (1, 1.0, 0.25)
    assert second == (2, pytest.approx(6.5), pytest.approx(0.2))
    assert rig.push(1.0, 0.01)  # nothing waits any more
    assert rig.pushes(3)[2] == (3, 1.0, 0.01)


@pytest.fixture
def rounds() -> Iterator[Rig]:
    rig = Rig(EpochGossip(topology=complete(2), num_rounds=50))
    yield rig
    for _ in range(100):
        rig.link.is_free.release()
    rig.sending.close(10.0)


def test_after_a_return_only_an_announcement_is_sent_and_no_number_is_missing(
    rounds: Rig,
) -> None:
    rig = rounds
    rig.model(0)
    assert rig.link.has_begun.acquire(timeout=10)
    for exchange in range(1, 4):
        rig.model(exchange)
    rig.lose_link()
    rig.arrivals(1)  # what was under way leaves the transport, but may not arrive
    rig.link.sent.clear()
    rig.appear(1)
    rig.peers.told(1, status(received=(0, 0)), 0.0)
    rig.sending.reported(1)
    rig.model(9, "catch-up")  # what the algorithm answers to the return
    rig.sending.release(0.0)
    old = [(number, PLACEHOLDER.kind, 0) for number in range(1, 5)]
    assert rig.arrivals(5) == [*old, (5, "catch-up", 9)]
    assert rig.peers[1].log.num_bytes == 4 * SIZE + 5 * 1024


def test_an_announcement_replaces_what_waits_for_a_link_that_is_up(rounds: Rig) -> None:
    rig = rounds
    rig.model(0)
    assert rig.link.has_begun.acquire(timeout=10)
    rig.model(1)
    rig.model(1, "catch-up")
    rig.model(2)
    rig.model(3, "catch-up")  # whoever is in exchange 1 skips to it, but not from exchange 2
    assert rig.sending.outbox.waiting[1] < 3.2 * 4 * SIZE
    old = [PLACEHOLDER.kind] * 2
    kinds = [m.kind for _, m in rig.peers[1].log.entries]
    assert kinds == [PLACEHOLDER.kind, *old, "params", "catch-up"]
    rig.link.is_free.release(2)
    kinds = [each[1] for each in rig.arrivals(5)]
    assert kinds == ["params", *old, "params", "catch-up"]


def test_what_has_arrived_is_kept_for_a_receiver_that_resumes(rounds: Rig) -> None:
    rig = rounds
    rig.model(0)
    rig.model(1)
    rig.peers.told(1, status(received=(1, 0)), 0.0)
    rig.model(5, "catch-up")
    kinds = [m.kind for _, m in rig.peers[1].log.entries]
    assert kinds == ["params", PLACEHOLDER.kind, "catch-up"]


def test_a_message_that_replaces_nothing_costs_one_question(
    rounds: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the log holds."""
    asked = list[str]()

    def replaces(algorithm: EpochGossip, newer: Message, older: Message) -> bool:
        asked.append(newer.kind)
        return False

    monkeypatch.setattr(EpochGossip, "replaces", replaces)
    for exchange in range(3):
        rounds.model(exchange)
    assert asked == ["params"] * 3


def test_no_round_begins_while_two_models_wait_for_a_receiver(rounds: Rig) -> None:
    rig = rounds
    rig.model(0)
    assert rig.link.has_begun.acquire(timeout=10)
    assert not rig.sending.is_congested
    rig.model(1)
    assert rig.sending.is_congested
    rig.arrivals(1)
    wait_until(lambda: not rig.sending.is_congested)


def test_a_model_with_as_much_beside_it_counts_once() -> None:
    rounds = EpochGossip(topology=complete(2), num_rounds=50)
    rig = Rig(ControlVariates(inner=EdgeGossip(inner=rounds)))
    rig.sending.send(1, Message("params", 0, {"params": torch.zeros(2 * SIZE)}))
    assert rig.link.has_begun.acquire(timeout=10)
    rig.sending.send(1, Message("spare-joined", 0))
    assert not rig.sending.is_congested
    rig.sending.send(1, Message("params", 1, {"params": torch.zeros(2 * SIZE)}))
    assert rig.sending.is_congested
    rig.link.is_free.release(2)
    rig.sending.close(10.0)


@pytest.mark.parametrize("is_cut", [True, False])
def test_pushes_that_wait_when_the_time_is_over_do_not_hold_up_final_models(
    is_cut: bool,
) -> None:
    """Unless this worker has ended by itself, so that others may still train."""
    gossip = GoSGD(topology=complete(2), num_rounds=50)
    judged = BestByValidation(
        inner=gossip, num_workers=2, keep=KeepBest(rounds=9), metric=ACCURACY
    )
    rig = Rig(FinalAverage(inner=judged, num_workers=2, ends_at=60.0))
    rig.push(1.0, 0.25)
    assert rig.link.has_begun.acquire(timeout=10)
    rig.sending.send(1, Message("best ask", 0, {}, {"check": 0}))
    rig.push(2.0, 0.125)
    members = {"members": torch.zeros(2, dtype=torch.int64)}
    rig.sending.send(1, Message("final members", 7, members, {"asks": 1}))
    model = {"params": torch.zeros(SIZE)}
    rig.sending.send(1, Message("final average", 7, model, {"cut": int(is_cut)}))
    push = PLACEHOLDER.kind if is_cut else "push"
    needed = ["final members", "final average"]
    kinds = [m.kind for _, m in rig.peers[1].log.entries]
    assert kinds == [push, "best ask", push, *needed]
    rig.link.is_free.release(3)
    arrived = [each[1] for each in rig.arrivals(5)]
    assert arrived == ["push", "best ask", push, *needed]


def weights(rig: Rig) -> list[tuple[int, float]]:
    return [
        (number, round(float(m.numbers["weight"]), 6)) for number, m in rig.peers[1].log.entries
    ]


def test_nothing_is_added_to_a_push_that_may_have_arrived_over_a_lost_link(rig: Rig) -> None:
    rig.push(1.0, 0.25)
    assert rig.link.has_begun.acquire(timeout=10)
    rig.lose_link()
    rig.appear(1)
    # Held until the other says what has arrived; these two can only wait.
    rig.push(3.0, 0.05)
    rig.push(5.0, 0.05)
    assert weights(rig) == [(1, 0.25), (2, 0.1)]
    rig.report(1)
    rig.push(7.0, 0.1)  # to the last one that waits
    first, second = rig.pushes(2)  # the first was under way all the time
    assert (first[0], second[0]) == (1, 2)
    assert second[1:] == (pytest.approx(5.5), pytest.approx(0.2))


def test_pushes_do_not_pile_up_over_links_that_are_lost_again_and_again(rig: Rig) -> None:
    rig.push(1.0, 0.25)
    assert rig.link.has_begun.acquire(timeout=10)
    for _ in range(5):
        rig.push(2.0, 0.02)
        rig.lose_link()
        rig.appear(1)
        rig.push(4.0, 0.02)
        rig.report(1)
    assert weights(rig) == [(1, 0.25), (2, 0.2)]
    assert rig.pushes(2)[1] == (2, pytest.approx(3.0), pytest.approx(0.2))


def test_what_is_repeated_while_it_waits_is_sent_once(rig: Rig) -> None:
    params, reported = torch.ones(SIZE), threading.Semaphore(0)
    rig.push(5.0, 0.25)
    assert rig.link.has_begun.acquire(timeout=10)

    def answer(tensor: torch.Tensor) -> bool:
        message = Message("push", 3, {"params": tensor}, {"weight": _LARGEST})
        return rig.sending.send(1, message, reported.release)

    for _ in range(3):  # a weight that is not joined with another
        assert answer(params)
    assert rig.peers[1].sent == 2
    assert answer(params.clone())  # other memory may change
    assert rig.peers[1].sent == 3
    for _ in range(2):
        assert reported.acquire(timeout=10)
    assert [number for number, *_ in rig.pushes(3)] == [1, 2, 3]
    rig.sending.close(10.0)
    assert answer(params)  # it may be lost by now
    assert rig.peers[1].sent == 4


def test_a_status_overtakes_a_model_and_does_not_count_it_as_left(rig: Rig) -> None:
    rig.sending.tell(1)  # the first that tells of this run keeps its place
    rig.push(1.0, 0.25)
    assert rig.link.has_begun.acquire(timeout=10)
    rig.sending.tell(1, again=True)
    wait_until(lambda: rig.told().sent == (0, 1))
    assert rig.told().left == 0
    assert rig.pushes(1)


def test_a_status_with_a_new_phase_keeps_its_place(rig: Rig) -> None:
    rig.push(1.0, 0.25)
    assert rig.link.has_begun.acquire(timeout=10)
    rig.sending.phase = Phase.FINISHED
    rig.sending.tell_all()
    assert rig.pushes(1)
    wait_until(lambda: rig.told().phase == Phase.FINISHED)
    assert [m.kind for _, m in rig.link.sent[-2:]] == ["push", STATUS]


def test_no_status_tells_a_new_phase_before_the_one_that_keeps_its_place(rig: Rig) -> None:
    rig.sending.tell(1)
    rig.push(1.0, 0.25)
    assert rig.link.has_begun.acquire(timeout=10)
    rig.sending.phase = Phase.FINISHED
    rig.sending.tell_all()
    rig.sending.tell(1, again=True)
    assert rig.pushes(1)
    rig.sending.close(10.0)
    kinds = [m.kind for _, m in rig.link.sent]
    assert kinds[kinds.index("push") + 1 :] == [STATUS] * 2
    rig.sending.tell(1, again=True)  # none keeps its place any more
    assert not rig.sending._in_place[1]


def test_a_status_claims_nothing_that_it_may_overtake(rig: Rig) -> None:
    rig.sending.tell(1)
    for number in range(2):  # the first may still be on its way in a stream
        rig.push(1.0, 0.25)
        assert rig.link.has_begun.acquire(timeout=10)
        if not number:
            assert rig.pushes(1)
    rig.sending.tell(1, again=True)
    wait_until(lambda: rig.told().sent == (0, 2))
    assert rig.told().left == 0
    assert rig.pushes(2)


def test_what_was_lost_with_one_of_two_links_is_no_gap_before_it_is_sent_again(
    rig: Rig,
) -> None:
    rig.push(1.0, 0.25)
    assert rig.pushes(1)
    rig.sending.link_ended(1)
    rig.sending.interrupted(1)
    rig.sending.tell(1, again=True)
    wait_until(lambda: rig.told().sent == (0, 1))
    assert rig.told().left == 0  # the other does not have it yet
    rig.peers.told(1, status(received=(0, 0)), 0.0)
    rig.sending.reported(1)
    rig.sending.release(0.0)
    assert rig.pushes(2)
    wait_until(lambda: rig.sending.is_idle)
    rig.sending.tell(1, again=True)
    wait_until(lambda: rig.told().left == 1)


def test_messages_that_wait_at_their_sender_are_no_gap(rig: Rig) -> None:
    for _ in range(3):
        rig.peers.told(1, status(sent=(2, 0), left=0), 0.0)
    assert rig.peers.lacking == []
    for _ in range(3):
        rig.peers.told(1, status(sent=(2, 0), left=1), 0.0)
    assert rig.peers.lacking == [1]
