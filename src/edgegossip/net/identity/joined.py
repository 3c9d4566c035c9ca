"""A run that this machine has joined by an invitation, and its folder."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from edgegossip.contract.errors import NetworkError
from edgegossip.net.identity.certificates import (
    authority_paths,
    holder_folder,
    holder_paths,
    load_key,
    read_file,
    write_file,
)
from edgegossip.net.identity.enrollment import (
    Kind,
    RefusedError,
    ask_as_member,
    ask_to_join,
)
from edgegossip.net.identity.invitation import Invitation
from edgegossip.net.identity.revocation import list_path
from edgegossip.net.identity.tls import TLS

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from edgegossip.contract.protocol import Rank, Seconds

_LOG = logging.getLogger("edgegossip.net")
_FILE = "joined.json"
_NEWS: Seconds = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRun:
    """A run of which this machine is a member. Nothing in it is secret.

    Args:
        run: Name of the run.
        name: Name of this machine in the run.
        rank: Its rank.
        service: Host and port of the signing service.
        fingerprint: SHA-256 of the authority's certificate, in hex.
        words: The recipe, its arguments, and options that all workers share.
        num_workers: Limit of the run.
        routers: Endpoints of routers, the preferred one first.
        listen: Endpoint for direct links; None if this machine cannot be called.
        version: Version of the package on the inviting machine.
        digest: SHA-256 of the recipe's file, in hex; None for a recipe of the package.
        kind: As in `Offer`.
    """

    run: str
    name: str
    rank: Rank
    service: tuple[str, int]
    fingerprint: str
    words: tuple[str, ...]
    num_workers: int
    routers: tuple[str, ...]
    listen: str | None
    version: str
    digest: str | None
    kind: Kind = "open"

    @classmethod
    def read(cls, folder: Path) -> JoinedRun:
        """Read the run that `folder` belongs to.

        Raises:
            NetworkError: If it belongs to none.
        """
        path = folder / _FILE
        if not path.exists():
            raise NetworkError(
                f"{folder} is not the folder of a run that this machine has joined; give its "
                "--out, or an invitation"
            )
        try:
            found = json.loads(read_file(path))
            host, port = found["service"]
            lists = {each: tuple(found[each]) for each in ("words", "routers")}
            return cls(**{**found, **lists, "service": (host, port)})
        except (ValueError, KeyError, TypeError):
            raise NetworkError(f"{path} is damaged; join with a new invitation") from None

    def write(self, folder: Path) -> None:
        """Keep the run in `folder`."""
        write_file(folder / _FILE, json.dumps(asdict(self), indent=1).encode(), mode=0o644)

    def forget(self, folder: Path) -> None:
        """Remove what this machine needs as a member; its model and its logs stay."""
        (folder / _FILE).unlink(missing_ok=True)
        self._remove_identity(folder)

    def _remove_identity(self, folder: Path) -> None:
        for path in holder_folder(certificates(folder), self.rank).glob("*.pem"):
            path.unlink()

    def move(self, folder: Path, rank: Rank) -> JoinedRun:
        """Get a certificate for the rank that a plan has given to this machine, and keep it.

        Raises:
            NetworkError: If the service refuses, or its certificate is not for this rank.
        """
        found, own = self.ask(folder, "renew"), self.tls(folder)
        moved = replace(self, rank=rank)
        _write_identity(
            certificates(folder),
            rank,
            load_key(own.key),
            str(found.get("certificate")),
            read_file(own.ca).decode(),
            str(found.get("revoked", "")),
        )
        moved.tls(folder).check(rank, [self.run])
        moved.write(folder)
        self._remove_identity(folder)
        return moved

    def tls(self, folder: Path) -> TLS:
        """Files of this machine's certificate."""
        return TLS.from_folder(certificates(folder), self.rank)

    def ask(self, folder: Path, question: str, **said: object) -> dict[str, Any]:
        """Ask the signing service; see `ask_as_member`."""
        fingerprint = bytes.fromhex(self.fingerprint)
        return ask_as_member(self.service, fingerprint, self.tls(folder), question, said)


def certificates(folder: Path) -> Path:
    """Where the folder of a joined run has certificates."""
    return folder / "certs"


def join_run(
    invitation: Invitation,
    folder: Path,
    name: str | None,
    *,
    wants_code: bool = False,
    port: int | None = None,
) -> tuple[JoinedRun, str | None]:
    """Join a run, and keep what this machine needs in `folder`.

    Args:
        invitation: The invitation, which is then spent.
        folder: Folder of the run on this machine. Its key is made here if it has none yet.
        name: Name of this machine; None for its host name.
        wants_code: Ask for the recipe's file.
        port: Port for direct links; None to use routers only.

    Returns:
        The run, and the content of the recipe's file if it was asked for.

    Raises:
        NetworkError: If the machine is refused, or the answer is not valid.
    """
    earlier = JoinedRun.read(folder) if (folder / _FILE).exists() else None
    if earlier is not None and earlier.run != invitation.run:
        raise NetworkError(
            f"{folder} belongs to run {earlier.run!r}, and the invitation is for "
            f"{invitation.run!r}; choose another --out"
        )
    key: object = ec.generate_private_key(ec.SECP256R1())
    if earlier is not None:
        name = earlier.name if name is None else name
        key = load_key(earlier.tls(folder).key)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    with _listening(port) as open_port:
        joined = ask_to_join(
            invitation,
            key,
            _host_name() if name is None else name,
            is_chosen=name is not None,
            wants_code=wants_code,
            port=open_port,
        )
    certs = certificates(folder)
    _write_identity(certs, joined.rank, key, joined.certificate, joined.ca, joined.revoked)
    offer = joined.offer
    run = JoinedRun(
        run=invitation.run,
        name=joined.name,
        rank=joined.rank,
        service=(invitation.host, invitation.port),
        fingerprint=invitation.fingerprint.hex(),
        words=offer.words,
        num_workers=offer.num_workers,
        routers=offer.routers,
        listen=f"tls/0.0.0.0:{open_port}" if joined.is_direct else None,
        version=offer.version,
        digest=offer.digest,
        kind=offer.kind,
    )
    run.tls(folder).check(joined.rank, [invitation.run])
    run.write(folder)
    return run, offer.code


def _write_identity(
    folder: Path, rank: Rank, key: PrivateKeyTypes, certificate: str, ca: str, revoked: str
) -> None:
    own = holder_folder(folder, rank)
    certificate_path, key_path = holder_paths(own, rank)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_file(key_path, pem, mode=0o600)
    write_file(authority_paths(own)[0], ca.encode(), mode=0o644)
    if revoked:
        write_file(list_path(own), revoked.encode(), mode=0o644)
    write_file(certificate_path, certificate.encode(), mode=0o644)


def _host_name() -> str:
    allowed = (
        c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in socket.gethostname()
    )
    return "".join(allowed)[:32] or "machine"


@contextmanager
def _listening(port: int | None) -> Iterator[int | None]:
    """Listen for the service's trial, at `port` or, if it is in use, at any free port."""
    if port is None:
        yield None
        return
    try:
        listener = socket.create_server(("", port))
    except OSError:
        listener = socket.create_server(("", 0))
    with listener:
        yield listener.getsockname()[1]


class RevocationNews:
    """Fetches the list of revoked certificates while a worker runs, in a thread of its own.

    Args:
        run: The run.
        folder: Its folder.
        expelled: Called once if this machine is no longer a member.
        seconds: Time between two questions.
    """

    def __init__(
        self,
        run: JoinedRun,
        folder: Path,
        expelled: Callable[[], None],
        seconds: Seconds = _NEWS,
    ) -> None:
        self._run = run
        self._folder = folder
        self._expelled = expelled
        self._seconds = seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="news", daemon=True)

    def __enter__(self) -> RevocationNews:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()

    def _follow(self) -> None:
        path = list_path(holder_folder(certificates(self._folder), self._run.rank))
        while not self._is_over.wait(self._seconds):
            try:
                content = str(self._run.ask(self._folder, "revoked")["revoked"]).encode()
            except RefusedError as error:
                _LOG.error("%s; this worker stops", error)
                self._expelled()
                return
            except (NetworkError, KeyError):
                continue  # the run goes on without its signing service
            # The worker itself verifies the authority's signature and the list's number.
            with suppress(NetworkError):
                if content and (not path.exists() or read_file(path) != content):
                    write_file(path, content, mode=0o644)
