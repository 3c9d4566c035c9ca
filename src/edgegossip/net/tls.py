"""Who may take part outside of one machine, and as whom: mutual TLS and access control."""

from __future__ import annotations

import logging
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from edgegossip.core.errors import NetworkError
from edgegossip.core.protocol import Rank
from edgegossip.net.address import Address
from edgegossip.net.certificates import (
    authority_paths,
    common_name,
    holder_name,
    holder_paths,
    is_pair,
    load_certificate,
    load_certificates,
    load_key,
)

_LOG = logging.getLogger("edgegossip.net")
_SOON = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class TLS:
    """The files by which a worker or router shows who it is, and knows others; all in PEM.

    Args:
        ca: Certificate of the authority that has signed those of all workers.
        certificate: Its own.
        key: Its private key, without a password.
    """

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def from_folder(cls, folder: Path | str, rank: Rank | None) -> TLS:
        """The files of worker `rank`, or of routers, where `edgegossip certs` puts them.

        >>> TLS.from_folder("certs", 2).certificate.as_posix()
        'certs/worker-2.pem'
        """
        folder = Path(folder)
        return cls(authority_paths(folder)[0], *holder_paths(folder, rank))

    def check(self, rank: Rank | None) -> datetime:
        """Find out before the start what would otherwise be a link that never comes up.

        Warns of a key that others can read, and of a certificate that soon expires.

        Returns:
            Until when the certificate is valid.

        Raises:
            NetworkError: If a file is missing or damaged, the certificate is not that of
                worker `rank` or of routers, not valid now or not signed by `ca`, or has
                another key.
        """
        for path in (self.ca, self.certificate, self.key):
            if not path.exists():
                which = "--router" if rank is None else f"--rank {rank}"
                raise NetworkError(
                    f"{path} is not there; make it where the authority is (edgegossip certs "
                    f"issue {which}) and copy it, with ca.pem, to this machine"
                )
        certificate = load_certificate(self.certificate)
        self._check_name(certificate, rank)
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        now = datetime.now(UTC)
        if not begin <= now <= end:
            raise NetworkError(
                f"{self.certificate} is valid from {_moment(begin)} to {_moment(end)}, and it "
                f"is {_moment(now)} here; set the clock, or issue another"
            )
        self._check_signature(certificate)
        if not is_pair(certificate, load_key(self.key)):
            raise NetworkError(
                f"{self.key} is not the key of {self.certificate}; copy both from one place"
            )
        self._warn(end, now)
        return end

    def _check_name(self, certificate: x509.Certificate, rank: Rank | None) -> None:
        name = common_name(certificate.subject)
        if name != holder_name(rank):
            raise NetworkError(
                f"{self.certificate} is of {name!r} and not of {holder_name(rank)!r}; give "
                "its own certificate, or another --rank"
            )

    def _check_signature(self, certificate: x509.Certificate) -> None:
        authorities = load_certificates(self.ca)
        if not any(has_signed(authority, certificate) for authority in authorities):
            names = " or ".join(repr(common_name(each.subject)) for each in authorities)
            raise NetworkError(
                f"{self.certificate} is signed by {common_name(certificate.issuer)!r} and not "
                f"by the authority in {self.ca}, {names}; all workers need certificates of "
                "one authority"
            )

    def _warn(self, end: datetime, now: datetime) -> None:
        if self.key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            _LOG.warning(
                "other users of this machine may read %s, and then take its place; "
                "use: chmod 600 %s",
                self.key,
                self.key,
            )
        if end - now < _SOON:
            _LOG.warning(
                "%s expires on %s, and links close then", self.certificate, _moment(end)
            )


def has_signed(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether `certificate` is one that `authority` has issued itself."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _moment(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def load_tls(folder: Path | str | None, rank: Rank | None) -> TLS | None:
    """The files of worker `rank`, or of routers, found good; see `require_tls`.

    Args:
        folder: Of the files; None for none.
        rank: The worker; None for a router.

    Raises:
        NetworkError: As `TLS.check` says.
    """
    if folder is None:
        return None
    tls = TLS.from_folder(folder, rank)
    tls.check(rank)
    return tls


def require_tls(address: Address, tls: TLS | None, *, insecure: bool) -> None:
    """Refuse to start where others could listen or take part.

    Args:
        address: Where this worker listens and connects to.
        tls: Its certificates, if any.
        insecure: Whether somebody has said that plain connections are all right.

    Raises:
        NetworkError: If `address` reaches beyond this machine and there is neither `tls` nor
            `insecure`, or if it has endpoints that do not go with what is given.
    """
    endpoints = (*address.listen, *address.connect)
    encrypted = [endpoint for endpoint in endpoints if endpoint.startswith("tls/")]
    if tls is None and encrypted:
        raise NetworkError(
            f"{encrypted[0]} needs certificates; make them with: edgegossip certs init"
        )
    if tls is not None and len(encrypted) < len(endpoints):
        plain = next(endpoint for endpoint in endpoints if endpoint not in encrypted)
        raise NetworkError(
            f"{plain} is not encrypted; with certificates, every endpoint is tls/HOST:PORT"
        )
    if tls is not None or (address.is_loopback and not address.multicast):
        return
    where = "multicast discovery" if address.multicast else ", ".join(endpoints)
    if not insecure:
        raise NetworkError(
            f"{where} reaches beyond this machine, where anyone could read and send; make "
            "certificates (edgegossip certs init), or say --insecure in a network that you "
            "trust"
        )
    _LOG.warning("nothing is encrypted and nobody is asked who they are: %s", where)


def zenoh_security(tls: TLS, run: str, num_workers: int) -> dict[str, object]:
    """Settings of a zenoh session by which a worker speaks for its own rank only.

    Zenoh checks this on every link, at both of its ends, by the common name in the other's
    certificate: worker R can send what comes from R, is told of the inbox of R, is sent what
    goes to R, and is alive as R. Everything else is dropped. A router passes on what workers
    say, so it may speak for all; to each worker it, too, holds to this.

    So names of machines are not compared, which certificates would otherwise have to list,
    with all addresses that discovery may find: an impostor with another worker's certificate
    gets nothing that is not for that other worker, wherever it sits.

    Args:
        tls: The files of this worker or router.
        run: Name of the run in the keys, or "*" for all of a router: messages go to
            `edgegossip/RUN/data/RECEIVER/SENDER`, tokens are `edgegossip/RUN/alive/RANK/N`.
        num_workers: Of the run.

    Returns:
        By the key in zenoh's configuration, what to insert there.
    """
    certificate, key = str(tls.certificate.resolve()), str(tls.key.resolve())
    return {
        # Discovery could otherwise lead to a plain link.
        "transport/link/protocols": ["tls"],
        # A second link of a session has the rights of the first. With more than one allowed,
        # zenoh makes sure that it is the same session, by a key of its own; with one, whoever
        # takes the id of a session that was called could join its link.
        "transport/unicast/max_links": 2,
        "transport/link/tls": {
            "root_ca_certificate": str(tls.ca.resolve()),
            "enable_mtls": True,
            "listen_certificate": certificate,
            "listen_private_key": key,
            "connect_certificate": certificate,
            "connect_private_key": key,
            "verify_name_on_connect": False,
            "close_link_on_expiration": True,
        },
        "access_control": _access_control(run, num_workers),
    }


def _access_control(run: str, num_workers: int) -> dict[str, object]:
    data = f"edgegossip/{run}/data"
    # Tokens of other runs may be seen, so that somebody can say that they are there.
    alive = "edgegossip/*/alive"
    both = ["ingress", "egress"]
    watch = ["declare_liveliness_subscriber", "liveliness_query"]
    rules = [
        _allow("watch", both, watch, f"{alive}/**"),
        _allow("alive", ["egress"], ["liveliness_token"], f"{alive}/*/*"),
        _allow("inbox", ["egress"], ["declare_subscriber"], f"{data}/*/*"),
    ]
    common = [rule["id"] for rule in rules]
    own: dict[Rank | None, list[dict[str, object]]] = {
        None: [
            _allow("alive routed", ["ingress"], ["liveliness_token"], f"{alive}/*/*"),
            _allow("inbox routed", ["ingress"], ["declare_subscriber"], f"{data}/*/*"),
            _allow("routed", both, ["put"], f"{data}/*/*"),
        ]
    }
    for rank in range(num_workers):
        own[rank] = [
            _allow(f"alive {rank}", ["ingress"], ["liveliness_token"], f"{alive}/{rank}/*"),
            _allow(f"inbox {rank}", ["ingress"], ["declare_subscriber"], f"{data}/{rank}/*"),
            _allow(f"from {rank}", ["ingress"], ["put"], f"{data}/*/{rank}"),
            _allow(f"to {rank}", ["egress"], ["put"], f"{data}/{rank}/*"),
        ]
    subjects, policies = [], []
    for holder, more in own.items():
        rules += more
        name = holder_name(holder)
        subjects.append({"id": name, "cert_common_names": [name]})
        policies.append({"subjects": [name], "rules": [*common, *(r["id"] for r in more)]})
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": subjects,
        "policies": policies,
    }


def _allow(name: str, flows: list[str], messages: list[str], keys: str) -> dict[str, object]:
    return {
        "id": name,
        "permission": "allow",
        "flows": flows,
        "messages": messages,
        "key_exprs": [keys],
    }
