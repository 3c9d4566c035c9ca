"""Direct streams by themselves: frames, tokens, certificates, limits."""

from __future__ import annotations

import fcntl
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from tests.certificate_folders import give, tell_revoked

from edgegossip.contract.protocol import Rank
from edgegossip.net import streams as module
from edgegossip.net.identity.certificates import issue, make_authority
from edgegossip.net.identity.revocation import revoke
from edgegossip.net.identity.tls import TLS, Credentials
from edgegossip.net.streams import TOKEN_BYTES, Stream, Streams

LEASE = 0.3
SENDER, RECEIVER, OTHER = 0, 1, 2
MOST = 1_000_000
SIOCOUTQNSD = 0x894B


def unwanted() -> None:
    raise AssertionError("a frame is too large")


def read(stream: Stream) -> bytes | None:
    """The next frame."""
    frame = stream.receive(MOST, unwanted)
    return None if frame is None else bytes(frame)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Rank], Credentials]:
    """Credentials of the workers of one authority."""
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder / "authority")
    issue(folder / "authority", [SENDER, RECEIVER, OTHER])
    return lambda rank: TLS.from_folder(
        give(folder / "authority", folder / str(rank), rank), rank
    ).check(rank)


class Ends:
    """Streams of a sender and a receiver."""

    def __init__(
        self,
        opened: ExitStack,
        sender: Credentials | None = None,
        receiver: Credentials | None = None,
        lease: float = LEASE,
    ) -> None:
        self.sender = Streams(None, lease, sender)
        self.receiver = Streams("127.0.0.1", lease, receiver)
        self.taken: SimpleQueue[Stream] = SimpleQueue()
        self._opened = opened
        for each in (self.sender, self.receiver):
            opened.callback(each.close)

    def offer(self, rank: Rank = SENDER) -> bytes:
        def take(stream: Stream) -> bool:
            self._opened.callback(stream.close)
            self.taken.put(stream)
            return True

        return self.receiver.offer(rank, take)

    def connect(self, token: bytes, rank: Rank = RECEIVER) -> Stream:
        stream = self.sender.connect(rank, "127.0.0.1", self.receiver.port, token)
        self._opened.callback(stream.close)
        return stream

    def pair(self) -> tuple[Stream, Stream]:
        """Both ends of a stream."""
        return self.connect(self.offer()), self.taken.get(timeout=5)


@pytest.fixture(params=["tcp", "tls"])
def ends(
    request: pytest.FixtureRequest,
    opened: ExitStack,
    certificates: Callable[[Rank], Credentials],
) -> Ends:
    if request.param == "tcp":
        return Ends(opened)
    return Ends(opened, certificates(SENDER), certificates(RECEIVER))


def is_refused(ends: Ends, token: bytes, rank: Rank = RECEIVER) -> bool:
    # An error of the system, of TLS, or of the stream.
    with pytest.raises(OSError):
        ends.connect(token, rank)
    return ends.taken.empty()


def test_frames_of_all_sizes_arrive_whole_and_in_order(ends: Ends) -> None:
    sender, receiver = ends.pair()
    frames = [secrets.token_bytes(size) for size in (0, 1, 16_384, 16_385, 0, MOST, 7)]

    def send() -> None:
        for frame in frames:
            sender.send([frame[:5], b"", memoryview(frame)[5:]])
        sender.send([bytes([number % 256]) for number in range(2000)])
        sender.finish()

    thread = threading.Thread(target=send)
    thread.start()
    for frame in frames:
        received = receiver.receive(MOST, unwanted)
        assert received is not None
        assert bytes(received) == frame
        assert not received.readonly
    assert read(receiver) == bytes(number % 256 for number in range(2000))
    assert read(receiver) is None
    thread.join()


def test_parts_of_other_types_are_sent_as_their_bytes(ends: Ends) -> None:
    sender, receiver = ends.pair()
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert sender.send([b"head", numbers.data]) == 28
    assert read(receiver) == b"head" + numbers.tobytes()


def test_the_sender_learns_that_all_has_been_read(ends: Ends) -> None:
    sender, receiver = ends.pair()
    watch = threading.Thread(target=sender.wait_for_end)
    watch.start()
    sender.send([b"last"])
    sender.finish()
    assert read(receiver) == b"last"
    assert watch.is_alive()
    assert read(receiver) is None
    receiver.close()
    watch.join(5)
    assert not watch.is_alive()


@pytest.mark.parametrize("part", [b"", b"\x10\0\0", struct.pack("<Q", 9) + b"part"])
def test_a_stream_that_ends_without_its_last_frame_is_an_error(
    opened: ExitStack, part: bytes
) -> None:
    ends = Ends(opened)
    token = ends.offer()
    with socket.create_connection(("127.0.0.1", ends.receiver.port)) as bare:
        bare.sendall(token)
        assert bare.recv(1)
        bare.sendall(part)
    with pytest.raises(ConnectionError):
        ends.taken.get(timeout=5).receive(MOST, unwanted)


def test_a_frame_that_is_too_large_takes_no_memory_and_the_next_one_arrives(ends: Ends) -> None:
    sender, receiver = ends.pair()
    complaints: list[str] = []

    def send() -> None:
        sender.send([bytes(MOST + 1)])
        sender.send([b"next"])
        with suppress(OSError):
            sender._write([memoryview(struct.pack("<Q", 2**63))])

    thread = threading.Thread(target=send)
    thread.start()
    following = receiver.receive(MOST, lambda: complaints.append("too large"))
    assert following is not None
    assert bytes(following) == b"next"
    assert complaints == ["too large"]
    with pytest.raises(OSError):
        receiver.receive(MOST, lambda: complaints.append("a claim"))
    assert complaints == ["too large", "a claim"]
    thread.join()


# Tokens.


def test_a_token_is_good_for_one_connection(ends: Ends) -> None:
    token = ends.offer()
    ends.connect(token)
    ends.taken.get(timeout=5)
    assert is_refused(ends, token)


def test_a_wrong_token_is_refused_and_spends_none(ends: Ends) -> None:
    token = ends.offer()
    assert is_refused(ends, secrets.token_bytes(TOKEN_BYTES))
    ends.connect(token)


def test_only_the_last_offer_counts_until_it_is_withdrawn(ends: Ends) -> None:
    first, second, other = ends.offer(), ends.offer(), ends.offer(OTHER)
    assert is_refused(ends, first)
    ends.receiver.withdraw(SENDER)
    assert is_refused(ends, second)
    del other  # it is of another worker, and stays


def test_what_is_not_wanted_any_more_is_refused(ends: Ends) -> None:
    token = ends.receiver.offer(SENDER, lambda stream: False)
    assert is_refused(ends, token)


def test_one_that_accepts_nothing_has_no_port(opened: ExitStack) -> None:
    assert Ends(opened).sender.port == 0


# Certificates.


def test_another_workers_certificate_is_refused_even_with_the_token(
    opened: ExitStack, certificates: Callable[[Rank], Credentials]
) -> None:
    ends = Ends(opened, certificates(OTHER), certificates(RECEIVER))
    assert is_refused(ends, ends.offer(SENDER))


def test_a_listener_with_another_workers_certificate_gets_no_token(
    opened: ExitStack, certificates: Callable[[Rank], Credentials]
) -> None:
    ends = Ends(opened, certificates(SENDER), certificates(OTHER))
    token = ends.offer()
    assert is_refused(ends, token, RECEIVER)
    assert ends.receiver._spend(token) is not None


def test_a_connection_without_tls_or_certificate_is_refused(
    opened: ExitStack, certificates: Callable[[Rank], Credentials]
) -> None:
    ends = Ends(opened, None, certificates(RECEIVER))
    assert is_refused(ends, ends.offer())


def test_a_foreign_or_revoked_certificate_is_refused(opened: ExitStack, tmp_path: Path) -> None:
    credentials = {}
    for name in ("ours", "theirs"):
        authority = tmp_path / name
        make_authority(authority)
        issue(authority, [SENDER, RECEIVER])
        for rank in (SENDER, RECEIVER):
            folder = give(authority, tmp_path / f"{name}-{rank}", rank)
            credentials[name, rank] = TLS.from_folder(folder, rank).check(rank)
    foreign = Ends(opened, credentials["theirs", SENDER], credentials["ours", RECEIVER])
    assert is_refused(foreign, foreign.offer())
    revoke(tmp_path / "ours", [SENDER])
    tell_revoked(tmp_path / "ours", tmp_path / f"ours-{RECEIVER}")
    told = TLS.from_folder(tmp_path / f"ours-{RECEIVER}", RECEIVER).check(RECEIVER)
    revoked = Ends(opened, credentials["ours", SENDER], told)
    assert is_refused(revoked, revoked.offer())
    unaware = Ends(opened, credentials["ours", SENDER], credentials["ours", RECEIVER])
    unaware.pair()


# Time and number.


def test_a_receiver_that_does_not_read_ends_the_stream_within_a_lease(ends: Ends) -> None:
    sender, _receiver = ends.pair()
    began = time.monotonic()

    def send() -> None:
        for _ in range(100):
            sender.send([bytes(MOST)])

    with pytest.raises(OSError):
        send()
    assert time.monotonic() - began < 20 * LEASE


def test_a_sender_that_stalls_within_a_frame_ends_the_stream(ends: Ends) -> None:
    sender, receiver = ends.pair()
    time.sleep(2 * LEASE)  # between frames it may take its time
    sender.send([b"hello"])
    assert read(receiver) == b"hello"
    sender._write([memoryview(struct.pack("<Q", 9) + b"part")])
    began = time.monotonic()
    with pytest.raises((BlockingIOError, TimeoutError)):
        receiver.receive(MOST, unwanted)
    assert LEASE / 2 < time.monotonic() - began < 20 * LEASE


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_the_kernel_takes_little_that_it_cannot_send(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between machines: within one, no path becomes slow."""
    monkeypatch.setattr(module, "_is_within_a_machine", lambda connection: False)
    sender, _receiver = ends.pair()
    most = 0

    def send() -> None:
        with suppress(OSError):
            while True:
                sender.send([bytes(MOST)])

    thread = threading.Thread(target=send)
    thread.start()
    while thread.is_alive():
        with suppress(OSError):  # the stream has ended
            unsent = fcntl.ioctl(sender._connection.fileno(), SIOCOUTQNSD, bytes(4))
            most = max(most, struct.unpack("i", unsent)[0])
        time.sleep(0.01)
    assert 0 < most < 2 * module._MAX_UNSENT


def test_what_the_kernel_takes_at_once_leaves_at_once(ends: Ends) -> None:
    sender, receiver = ends.pair()
    if sender._is_tls:
        assert sender.begin([b"one"])  # TLS may have to wait, whatever the size
        sender.send_rest()
    else:
        assert not sender.begin([b"o", b"ne"])
    assert bytes(receiver.receive(MOST, unwanted) or b"") == b"one"


def test_a_rest_leaves_before_the_next_frame_and_nobody_waits_for_it(ends: Ends) -> None:
    sender, receiver = ends.pair()
    sender._lease = 30.0
    frames = [bytes([number]) * MOST for number in range(40)]
    seconds = list[float]()
    has_rest = False  # until the kernel does not take a whole one
    while not has_rest:
        began = time.monotonic()
        has_rest = sender.begin([frames[len(seconds)]])
        seconds.append(time.monotonic() - began)
    frames = frames[: len(seconds)]
    assert max(seconds) < sender._lease / 2
    following = threading.Thread(target=sender.send, args=([b"next"],))
    following.start()
    for frame in [*frames, b"next"]:
        assert bytes(receiver.receive(MOST, unwanted) or b"") == frame
    following.join()
    sender.send_rest()  # nothing is left
    sender.finish()
    assert receiver.receive(MOST, unwanted) is None


def test_a_frame_that_is_too_large_to_wait_for_is_a_rest(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 100)
    sender, receiver = ends.pair()
    assert sender.begin([bytes(101)])
    sender.send_rest()
    assert bytes(receiver.receive(MOST, unwanted) or b"") == bytes(101)


def test_closing_wakes_those_who_wait(ends: Ends) -> None:
    sender, receiver = ends.pair()
    ended: SimpleQueue[str] = SimpleQueue()

    def receive() -> None:
        with pytest.raises(OSError):
            receiver.receive(MOST, unwanted)
        ended.put("receiver")

    def watch() -> None:
        sender.wait_for_end()
        ended.put("sender")

    for target in (receive, watch):
        threading.Thread(target=target, daemon=True).start()
    time.sleep(0.05)
    receiver.close()
    receiver.close()
    assert {ended.get(timeout=5) for _ in range(2)} == {"receiver", "sender"}
    sender.close()
    with pytest.raises(OSError):
        sender.send([b"late"])


def strangers(ends: Ends, opened: ExitStack, number: int) -> list[socket.socket]:
    address = ("127.0.0.1", ends.receiver.port)
    return [opened.enter_context(socket.create_connection(address)) for _ in range(number)]


def test_silent_connections_are_ended_and_hold_up_nobody_for_long(
    monkeypatch: pytest.MonkeyPatch, ends: Ends, opened: ExitStack
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    silent = strangers(ends, opened, module._MOST_AT_ONCE)
    waiting = strangers(ends, opened, 1)[0]
    # It gets a place only when one of those before it has lost its own.
    waiting.settimeout(5)
    began = time.monotonic()
    for each in silent:
        each.settimeout(5)
        with suppress(ConnectionError):
            assert each.recv(100) == b""
    with suppress(ConnectionError):
        assert waiting.recv(100) == b""
    assert 0.8 < time.monotonic() - began < 5
    ends.pair()


def test_one_byte_at_a_time_wins_no_time(
    monkeypatch: pytest.MonkeyPatch, opened: ExitStack
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.5)
    ends = Ends(opened)
    token, [slow] = ends.offer(), strangers(ends, opened, 1)
    began = time.monotonic()
    with suppress(OSError):
        for each in token:
            slow.sendall(bytes([each]))
            time.sleep(0.4)
    assert time.monotonic() - began < 5
    assert ends.taken.empty()
    ends.connect(token)


def test_a_listener_that_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, opened: ExitStack
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    silent = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    streams = Streams(None, LEASE, None)
    with pytest.raises(TimeoutError):
        streams.connect(RECEIVER, "127.0.0.1", silent.getsockname()[1], bytes(TOKEN_BYTES))


def test_after_closing_nobody_is_accepted(ends: Ends) -> None:
    token = ends.offer()
    ends.receiver.close()
    assert is_refused(ends, token)
