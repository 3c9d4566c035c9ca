"""Invitations: one line with which a new machine joins a run, once and for a limited time."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

from edgegossip.contract.errors import UsageError
from edgegossip.net.identity.certificates import RUN_NAME

_SCHEME = "edgegossip://"
_TOKEN_BYTES = 16
_CHECK_BYTES = 4
_FORM = re.compile(
    r"edgegossip://(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+):(?P<port>\d{1,5})/(?P<run>[^/]+)"
    r"/(?P<fingerprint>[\w-]{43})/(?P<secret>[\w-]{27})"
)


@dataclass(frozen=True, slots=True)
class Invitation:
    """All that a new machine must know to join a run.

    Args:
        host: Name or address of the signing service's machine.
        port: Port of the signing service.
        run: Name of the run.
        fingerprint: SHA-256 of the authority's certificate. The joining machine sends nothing
            to a machine that cannot prove to be this authority's.
        token: 16 random bytes that work once. They are never sent: both sides only prove
            that they know them.

    >>> text = str(Invitation("pi.local", 7446, "night", bytes(32), bytes(16)))
    >>> text.startswith("edgegossip://pi.local:7446/night/AAAA"), len(text)
    (True, 104)
    >>> Invitation.parse(text).run
    'night'
    """

    host: str
    port: int
    run: str
    fingerprint: bytes
    token: bytes = field(repr=False)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        start = f"{_SCHEME}{host}:{self.port}/{self.run}/{_text(self.fingerprint)}"
        return f"{start}/{_text(self.token + _check(start, self.token))}"

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Read an invitation.

        Raises:
            UsageError: If `text` is not a whole invitation. The error does not repeat the text,
                because it would appear in logs.
        """
        problem = UsageError(
            "this is not a whole invitation; it is one line from `edgegossip invite`, "
            f"{_SCHEME}HOST:PORT/RUN/... - copy it again, from beginning to end"
        )
        match = _FORM.fullmatch(text.strip())
        if match is None or not RUN_NAME.fullmatch(match["run"]):
            raise problem
        try:
            fingerprint, secret = _bytes(match["fingerprint"]), _bytes(match["secret"])
        except (ValueError, binascii.Error):
            raise problem from None
        token, check = secret[:_TOKEN_BYTES], secret[_TOKEN_BYTES:]
        # A mistyped character would otherwise look like an attack.
        if not hmac.compare_digest(check, _check(text.strip().rpartition("/")[0], token)):
            raise problem
        if not 1 <= (port := int(match["port"])) < 2**16:
            raise problem
        return cls(match["host"].strip("[]"), port, match["run"], fingerprint, token)


def new_token() -> bytes:
    """Draw the token of an invitation."""
    return secrets.token_bytes(_TOKEN_BYTES)


def token_id(token: bytes) -> str:
    """The public name of a token, by which the service finds its key."""
    return hashlib.sha256(b"edgegossip token id\0" + token).hexdigest()[:16]


def token_key(token: bytes) -> bytes:
    """The key with which both sides prove that they know a token."""
    return hashlib.sha256(b"edgegossip token key\0" + token).digest()


def proof(key: bytes, side: str, transcript: bytes, body: str) -> str:
    """Prove, for one connection only, that `side` knows the token behind `key`.

    Args:
        key: See `token_key`.
        side: "joining" or "signing", so that neither side's proof works for the other.
        transcript: See `enrollment.transcript`.
        body: The proved text.
    """
    text = side.encode() + b"\0" + transcript + b"\0" + body.encode()
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def _check(start: str, token: bytes) -> bytes:
    return hashlib.sha256(start.encode() + b"\0" + token).digest()[:_CHECK_BYTES]


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
