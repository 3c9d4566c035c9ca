"""The signing service refuses everyone but the holder of an open invitation."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.tiers import thorough

from edgegossip.contract.errors import NetworkError, UsageError
from edgegossip.net.identity.certificates import (
    authority_folder,
    common_name,
    holder_folder,
    holder_paths,
    is_pair,
    issue,
    issue_for,
    make_authority,
    make_service_identity,
    write_file,
)
from edgegossip.net.identity.enrollment import (
    Channel,
    Joined,
    Offer,
    ask_as_member,
    ask_to_join,
    make_request,
)
from edgegossip.net.identity.invitation import Invitation, proof, token_id, token_key
from edgegossip.net.identity.members import Members
from edgegossip.net.identity.revocation import revoked_serials
from edgegossip.net.identity.signing import Guesses, SigningService
from edgegossip.net.identity.tls import TLS

OFFER = Offer(
    run="night",
    words=("quickstart", "--seed", "3", "--only", "gosgd"),
    num_workers=2,
    routers=("tls/127.0.0.1:7447",),
    version="1",
    digest="ab",
    code="print('hello')",
)


@dataclass
class Clock:
    now: float = 1e9

    def __call__(self) -> float:
        return self.now


class House:
    """An authority with a signing service."""

    def __init__(self, folder: Path, opened: ExitStack, guesses: Guesses | None = None) -> None:
        self.folder = folder
        make_authority(authority_folder(folder))
        self.clock = Clock()
        self.members = Members(authority_folder(folder), "night", self.clock)
        self.service = SigningService(self.members, OFFER, host="127.0.0.1", guesses=guesses)
        opened.enter_context(self.service)

    def invite(self) -> Invitation:
        return self.service.invitation("127.0.0.1", token=self.members.invite())

    def files(self, joined: Joined, key: ec.EllipticCurvePrivateKey, folder: Path) -> TLS:
        own = holder_folder(folder, joined.rank)
        certificate, key_path = holder_paths(own, joined.rank)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_file(key_path, pem, mode=0o600)
        write_file(certificate, joined.certificate.encode(), mode=0o644)
        write_file(own / "ca.pem", joined.ca.encode(), mode=0o644)
        return TLS.from_folder(folder, joined.rank)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def house(tmp_path: Path, opened: ExitStack) -> House:
    return House(tmp_path / "certs", opened)


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def join(
    invitation: Invitation,
    name: str = "pi",
    key: ec.EllipticCurvePrivateKey | None = None,
    *,
    is_chosen: bool = True,
    wants_code: bool = False,
) -> Joined:
    return ask_to_join(
        invitation,
        new_key() if key is None else key,
        name,
        is_chosen=is_chosen,
        wants_code=wants_code,
        patience=5.0,
    )


def test_an_invitation_gives_a_certificate_for_a_key_that_stays(
    house: House, tmp_path: Path
) -> None:
    key = new_key()
    joined = join(house.invite(), key=key)
    assert (joined.rank, joined.name) == (0, "pi")
    certificate = x509.load_pem_x509_certificate(joined.certificate.encode())
    assert common_name(certificate.subject) == "worker-0@night"
    assert is_pair(certificate, key)
    house.files(joined, key, tmp_path / "pi").check(0, ["night"])
    assert joined.offer == replace(OFFER, code=None)
    assert not [path for path in house.folder.rglob("*-key.pem") if path.name != "ca-key.pem"]


def test_code_is_sent_only_if_asked_for(house: House) -> None:
    assert join(house.invite(), wants_code=True).offer.code == OFFER.code


def test_an_invitation_works_once(house: House) -> None:
    invitation = house.invite()
    join(invitation)
    with pytest.raises(NetworkError, match="has been used"):
        join(invitation, "other")
    assert [each.name for each in house.members.rows()] == ["pi"]


def test_of_two_machines_with_one_invitation_one_gets_in(house: House) -> None:
    invitation, results = house.invite(), []

    def attempt(name: str) -> None:
        try:
            results.append(join(invitation, name).name)
        except NetworkError as error:
            results.append(str(error))

    threads = [threading.Thread(target=attempt, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(house.members.rows()) == 1
    assert sum("has been used" in each for each in results) == 1


def test_an_invitation_is_judged_again_when_it_is_spent(house: House) -> None:
    # Both conversations have found it open before either of them spends it.
    id = token_id(house.members.invite())
    for key in (house.members.key_of(id), house.members.key_of(id)):
        assert key
    house.members.admit(id, "a", "aa", 2, lambda rank: "1")
    with pytest.raises(NetworkError, match="has been used"):
        house.members.admit(id, "b", "bb", 2, lambda rank: "2")


def test_an_invitation_expires(house: House) -> None:
    invitation = house.invite()
    house.clock.now += 3599
    join(invitation)
    invitation = house.invite()
    house.clock.now += 3600
    with pytest.raises(NetworkError, match="has expired"):
        join(invitation, "late")


def test_an_unknown_token_is_refused(house: House) -> None:
    with pytest.raises(NetworkError, match="unknown"):
        join(replace(house.invite(), token=bytes(16)))


def test_a_token_id_without_the_token_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    invitation = house.invite()
    real = token_id(invitation.token)
    monkeypatch.setattr("edgegossip.net.identity.enrollment.token_id", lambda token: real)
    with pytest.raises(NetworkError, match="unknown"):
        join(replace(invitation, token=bytes(16)))
    monkeypatch.undo()
    join(invitation)  # a wrong guess does not spend it


# Other authorities, and machines in the middle.


class Eavesdropper:
    """Passes bytes between a caller and the service, and keeps them."""

    def __init__(self, port: int, opened: ExitStack) -> None:
        self.listener = opened.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        self.port = self.listener.getsockname()[1]
        self.heard = b""
        self._to = port
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        opened.callback(self._thread.join, 5)

    def _run(self) -> None:
        one, _ = self.listener.accept()
        with one, socket.create_connection(("127.0.0.1", self._to)) as other:
            back = threading.Thread(target=self._pass, args=(other, one), daemon=True)
            back.start()
            self._pass(one, other)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while piece := source.recv(2**16):
                self.heard += piece
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_a_recorded_conversation_is_useless(house: House, opened: ExitStack) -> None:
    middle = Eavesdropper(house.service.port, opened)
    invitation = house.invite()
    joined = join(replace(invitation, port=middle.port))
    assert joined.rank == 0
    assert invitation.token not in middle.heard
    assert joined.certificate.encode() not in middle.heard  # TLS 1.3 hides it


class Impostor:
    """A service of someone else, which notes what it is told.

    Args:
        folder: Of its authority.
        opened: Closes it.
        certificate: Its certificate and key, in PEM; by default of a service of its authority.
        authority: The certificate that it claims to be its authority's, in PEM.
    """

    def __init__(
        self,
        opened: ExitStack,
        folder: Path,
        certificate: bytes,
        authority: bytes,
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        write_file(folder / "impostor.pem", certificate, mode=0o600)
        context.load_cert_chain(folder / "impostor.pem")
        listener = opened.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
        self.port = listener.getsockname()[1]
        self.told: bytes | None = None
        self.has_ended = threading.Event()

        def serve() -> None:
            plain, _ = listener.accept()
            try:
                with context.wrap_socket(plain, server_side=True) as connection:
                    channel = Channel(connection)
                    channel.send(edgegossip=1, authority=authority.decode(), nonce="00")
                    self.told = b""
                    while piece := connection.recv(2**16):
                        self.told += piece
            except OSError:
                pass
            finally:
                self.has_ended.set()

        threading.Thread(target=serve, daemon=True).start()


def service_of(folder: Path) -> bytes:
    return b"".join(make_service_identity(folder))


def worker_of(folder: Path) -> bytes:
    """A member's certificate, which the authority has signed as well."""
    key = new_key()
    certificate = issue_for(folder, 1, key.public_key(), run_name="night")
    return certificate.public_bytes(Encoding.PEM) + key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


@pytest.mark.parametrize("case", ["other authority", "claims the authority", "a member"])
def test_nothing_is_sent_to_a_machine_without_the_authority(
    house: House, opened: ExitStack, tmp_path: Path, case: str
) -> None:
    theirs, ours = tmp_path / "theirs", authority_folder(house.folder)
    make_authority(theirs)
    certificate = worker_of(ours) if case == "a member" else service_of(theirs)
    shown = theirs if case == "other authority" else ours
    impostor = Impostor(opened, tmp_path, certificate, (shown / "ca.pem").read_bytes())
    with pytest.raises(NetworkError, match="does not own the authority"):
        join(replace(house.invite(), port=impostor.port))
    assert impostor.has_ended.wait(5)
    assert impostor.told == b""


def test_an_invitation_with_a_changed_fingerprint_gets_its_holder_nowhere(
    house: House, opened: ExitStack, tmp_path: Path
) -> None:
    # The man in the middle has replaced the fingerprint by his own, but not learnt the token.
    other = House(tmp_path / "theirs", opened)
    real = house.invite()
    changed = replace(real, fingerprint=other.invite().fingerprint, port=other.service.port)
    with pytest.raises(NetworkError, match="unknown"):
        join(changed)
    # Nor can he pass on what he was told: it speaks of his own authority and certificate.
    body = json.dumps({"name": "x", "request": make_request(new_key(), "x"), "port": None})
    told = proof(token_key(real.token), "joining", b"of his own connection", body)
    assert ask(house, {"ask": "join", "id": token_id(real.token), "body": body, "proof": told})
    assert house.members.rows() == other.members.rows() == []
    join(real)


def test_a_service_that_does_not_know_the_token_is_not_believed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forged(key: bytes, side: str, transcript: bytes, body: str) -> str:
        return proof(key if side == "joining" else bytes(32), side, transcript, body)

    monkeypatch.setattr("edgegossip.net.identity.signing.proof", forged)
    with pytest.raises(NetworkError, match="does not know the invitation"):
        join(house.invite())


def ask(house: House, *messages: dict[str, object], tls: TLS | None = None) -> str:
    """Speak with the service without its client; returns why it refused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if tls is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    with (
        socket.create_connection(("127.0.0.1", house.service.port), 5) as plain,
        context.wrap_socket(plain) as connection,
    ):
        channel = Channel(connection)
        channel.receive()
        for message in messages:
            channel.send(**message)
        return str(channel.receive().get("refused"))


def test_a_proof_of_one_connection_is_refused_on_another(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, object]] = []
    send = Channel.send

    def record(self: Channel, **message: object) -> None:
        if message.get("ask") == "join":
            sent.append(message)
            raise NetworkError("cut off")  # so that the token stays open
        send(self, **message)

    monkeypatch.setattr(Channel, "send", record)
    with pytest.raises(NetworkError, match="cut off"):
        join(house.invite())
    monkeypatch.undo()
    assert "unknown" in ask(house, sent[0])
    assert house.members.rows() == []


def test_a_service_speaks_only_tls_1_3(house: House) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    address = ("127.0.0.1", house.service.port)
    with (
        socket.create_connection(address, 5) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain)


# Floods.


def test_an_address_with_many_wrong_guesses_has_to_wait(
    tmp_path: Path, opened: ExitStack
) -> None:
    clock = Clock()
    guesses = Guesses(most=3, seconds=60, clock=clock)
    house = House(tmp_path / "certs", opened, guesses)
    invitation = house.invite()
    for _ in range(3):
        with pytest.raises(NetworkError, match="unknown"):
            join(replace(invitation, token=bytes(16)))
    with pytest.raises(NetworkError, match=r"reset|closed|refuses TLS|cannot reach"):
        join(invitation)
    assert house.members.rows() == []
    clock.now += 61
    assert join(invitation).rank == 0


def test_failures_of_one_address_do_not_concern_others() -> None:
    guesses = Guesses(most=2, clock=Clock(), most_addresses=2)
    for address in ("a", "a", "b"):
        guesses.failed(address)
    assert guesses.is_refused("a")
    assert not guesses.is_refused("b")
    guesses.failed("c")  # the first one is forgotten, as memory is limited
    assert not guesses.is_refused("a")


def test_idle_connections_leave_room_for_others(house: House, opened: ExitStack) -> None:
    address = ("127.0.0.1", house.service.port)
    idle = [opened.enter_context(socket.create_connection(address)) for _ in range(10)]
    # Those beyond the fourth are closed at once.
    for connection in idle[4:]:
        connection.settimeout(5)
        assert connection.recv(1) == b""
    for connection in idle[:4]:
        connection.close()


def test_a_long_message_is_refused(house: House) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", house.service.port), 5) as plain,
        context.wrap_socket(plain) as connection,
    ):
        channel = Channel(connection)
        channel.receive()
        with suppress(OSError):  # it may be closed while it is sent
            channel.send(ask="x" * 2**20)
        with pytest.raises((OSError, NetworkError)):
            channel.receive()


@pytest.mark.parametrize(
    "request_text", ["", "hello", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n"]
)
def test_a_damaged_request_is_refused(
    house: House, monkeypatch: pytest.MonkeyPatch, request_text: str
) -> None:
    monkeypatch.setattr(
        "edgegossip.net.identity.enrollment.make_request", lambda key, name: request_text
    )
    with pytest.raises(NetworkError, match="certificate request is damaged"):
        join(house.invite())
    assert house.members.rows() == []


# Ranks and names.


def test_machines_get_the_lowest_rank_and_returning_names_their_own(house: House) -> None:
    first, second = new_key(), new_key()
    assert join(house.invite(), "a", first).rank == 0
    assert join(house.invite(), "b", second).rank == 1
    with pytest.raises(NetworkError, match="has its 2 workers"):
        join(house.invite(), "c")
    assert join(house.invite(), "a", first).rank == 0  # the same key
    with pytest.raises(NetworkError, match="another machine"):
        join(house.invite(), "a")
    house.members.remove("b", "left")
    assert join(house.invite(), "b").rank == 1  # a name that has left may have a new key
    house.members.remove("b", "left")
    assert join(house.invite(), "c").rank == 1
    with pytest.raises(NetworkError, match="has its 2 workers"):
        join(house.invite(), "b")


def test_a_full_run_does_not_spend_the_invitation(house: House) -> None:
    join(house.invite(), "a")
    join(house.invite(), "b")
    invitation = house.invite()
    with pytest.raises(NetworkError, match="has its 2 workers"):
        join(invitation, "c")
    house.members.remove("a", "left")
    assert join(invitation, "c").rank == 0


def test_a_name_that_nobody_chose_gets_a_number(house: House) -> None:
    assert join(house.invite(), "pi", is_chosen=False).name == "pi"
    assert join(house.invite(), "pi", is_chosen=False).name == "pi-2"


@pytest.mark.parametrize("name", ["", "a b", "x" * 41, "../../etc"])
def test_a_strange_name_is_refused(house: House, name: str) -> None:
    with pytest.raises((NetworkError, ValueError), match=r"name|Length|length|characters"):
        join(house.invite(), name)


def test_a_banned_machine_cannot_come_back(house: House, tmp_path: Path) -> None:
    key = new_key()
    joined = join(house.invite(), "a", key)
    tls = house.files(joined, key, tmp_path / "a")
    service = ("127.0.0.1", house.service.port)
    fingerprint = house.invite().fingerprint
    rows = ask_as_member(service, fingerprint, tls, "members")["members"]
    assert [(each["name"], each["rank"]) for each in rows] == [("a", 0)]
    house.members.remove("a", "banned")
    with pytest.raises(NetworkError, match="banned"):
        ask_as_member(service, fingerprint, tls, "members")
    for name, other in (("a", new_key()), ("b", key)):  # by its name, or by its key
        with pytest.raises(NetworkError, match="banned"):
            join(house.invite(), name, other)
    revoked = (authority_folder(house.folder) / "revoked.pem").read_bytes()
    write_file(holder_folder(tmp_path / "a", 0) / "revoked.pem", revoked, mode=0o644)
    with pytest.raises(NetworkError, match="revoked"):
        tls.check(0)


def test_a_name_can_be_banned_before_it_joins(house: House) -> None:
    assert house.members.remove("evil", "banned") is None
    with pytest.raises(NetworkError, match="banned"):
        join(house.invite(), "evil")


def test_a_member_leaves_by_its_own_certificate(house: House, tmp_path: Path) -> None:
    key = new_key()
    tls = house.files(join(house.invite(), "a", key), key, tmp_path / "a")
    service = ("127.0.0.1", house.service.port)
    fingerprint = house.invite().fingerprint
    assert ask_as_member(service, fingerprint, tls, "leave") == {"left": "a"}
    with pytest.raises(NetworkError, match="left"):
        ask_as_member(service, fingerprint, tls, "members")
    with pytest.raises(NetworkError, match="is left"):
        ask_as_member(service, fingerprint, tls, "anything")


def test_strangers_get_no_answer_for_members(house: House) -> None:
    assert "only members" in ask(house, {"ask": "members"})


def test_certificates_of_other_kinds_get_no_answer_for_members(
    house: House, tmp_path: Path
) -> None:
    issue(authority_folder(house.folder), [None], out=tmp_path)  # a router's, for example
    tls = TLS.from_folder(tmp_path, None)
    assert "no member" in ask(house, {"ask": "members"}, tls=tls)


# The line, and the files.


def test_a_mistyped_invitation_is_noticed_and_not_repeated() -> None:
    text = str(Invitation("h", 1, "r", bytes(32), bytes(range(16))))
    assert Invitation.parse(f" {text}\n").token == bytes(range(16))
    for wrong in (text[:-1], text.replace("/r/", "/s/"), text.replace("AAAA", "AABA"), "x"):
        with pytest.raises(UsageError, match="not a whole invitation") as caught:
            Invitation.parse(wrong)
        assert wrong == "x" or wrong[-27:] not in str(caught.value)


def test_addresses_of_ipv6_are_in_brackets() -> None:
    text = str(Invitation("2001:db8::1", 7446, "r", bytes(32), bytes(16)))
    assert text.startswith("edgegossip://[2001:db8::1]:7446/")
    assert Invitation.parse(text).host == "2001:db8::1"


def test_a_token_is_in_no_file_and_no_log(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    invitation = house.invite()
    assert "token" not in repr(invitation)
    join(invitation)
    texts = [path.read_bytes() for path in house.folder.rglob("*") if path.is_file()]
    secret = str(invitation).rpartition("/")[2]
    for hidden in (invitation.token, invitation.token.hex().encode(), secret.encode()):
        assert not any(hidden in text for text in texts)
    assert secret not in caplog.text
    mode = house.members.path.stat().st_mode
    assert mode & 0o077 == 0


def test_a_spent_token_leaves_no_key(house: House) -> None:
    invitation = house.invite()
    key = token_key(invitation.token).hex()
    assert key in house.members.path.read_text()
    join(invitation)
    assert key not in house.members.path.read_text()


@thorough
def test_a_damaged_file_of_members_is_named(house: House) -> None:
    house.members.path.write_text("{")
    with pytest.raises(NetworkError, match=r"night\.members\.json is damaged"):
        house.members.rows()


def test_a_plan_without_one_machine_moves_the_others_up(house: House, tmp_path: Path) -> None:
    key = new_key()
    join(house.invite(), "a")
    tls = house.files(join(house.invite(), "b", key), key, tmp_path)
    house.members.renumber({1: 0})
    assert [(x.name, x.rank, x.state) for x in house.members.rows()] == [
        ("b", 0, "member"),
        ("a", 0, "left"),
    ]
    service = ("127.0.0.1", house.service.port)
    fingerprint = house.invite().fingerprint
    answer = ask_as_member(service, fingerprint, tls, "renew")
    certificate = x509.load_pem_x509_certificate(answer["certificate"].encode())
    assert common_name(certificate.subject) == "worker-0@night"
    assert is_pair(certificate, key)
    former = x509.load_pem_x509_certificate(tls.certificate.read_bytes())
    assert former.serial_number in revoked_serials(authority_folder(house.folder))
    assert certificate.serial_number not in revoked_serials(authority_folder(house.folder))
    with pytest.raises(NetworkError, match="no member of"):  # only the new one is in force
        ask_as_member(service, fingerprint, tls, "members")


def test_without_a_plan_nobody_is_told_what_to_do(house: House, tmp_path: Path) -> None:
    key = new_key()
    tls = house.files(join(house.invite(), "a", key), key, tmp_path)
    with pytest.raises(NetworkError, match="no plan is being made for this run"):
        ask_as_member(
            ("127.0.0.1", house.service.port), house.invite().fingerprint, tls, "next"
        )
