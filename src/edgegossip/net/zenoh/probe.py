"""A probe: test whether an endpoint is reachable, without joining a run."""

from __future__ import annotations

import re
import socket
import ssl
import time
from dataclasses import dataclass

from cryptography import x509

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Seconds
from edgegossip.net.address import parse
from edgegossip.net.identity.certificates import common_name
from edgegossip.net.identity.tls import TLS

# In TLS 1.3 the peer judges our certificate after the handshake.
_VERDICT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Reached:
    """Result of a successful probe.

    Args:
        seconds: Time that connecting took, including the handshake.
        name: Common name in the other end's certificate; None without TLS.
    """

    seconds: Seconds
    name: str | None


def probe(endpoint: str, tls: TLS | None = None, patience: Seconds = 3.0) -> Reached:
    """Connect to an endpoint, complete the TLS handshake if there is one, and disconnect.

    Args:
        endpoint: Endpoint such as "tls/host:7447".
        tls: This worker's files; without them, there is no handshake with a tls endpoint.
        patience: Time limit for each step.

    Raises:
        NetworkError: If `endpoint` cannot be reached, or one end rejects the other's
            certificate.
        ValueError: If `endpoint` is malformed.
    """
    # Zenoh's options after ? or # are not part of the location.
    protocol, host, port = parse("connect", re.split(r"[?#]", endpoint)[0])
    begin = time.perf_counter()
    try:
        with socket.create_connection((host, port), patience) as plain:
            if protocol == "tcp" or tls is None:
                return Reached(time.perf_counter() - begin, None)
            with _shake_hands(plain, tls, host) as encrypted:
                seconds = time.perf_counter() - begin
                _wait_for_verdict(encrypted)
                return Reached(seconds, _name(encrypted))
    except ssl.SSLCertVerificationError as error:
        raise NetworkError(f"its certificate is refused: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise NetworkError(f"no TLS handshake: {_reason(error)}") from error
    except TimeoutError as error:
        raise NetworkError(f"no answer within {patience:g} s; is there a firewall?") from error
    except socket.gaierror as error:
        raise NetworkError(f"there is no host {host!r}") from error
    except ConnectionRefusedError as error:
        raise NetworkError("no program listens there; is the worker running?") from error
    except OSError as error:
        raise NetworkError(error.strerror or str(error)) from error


def _shake_hands(plain: socket.socket, tls: TLS, host: str) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # as workers do: see zenoh_security
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.certificate, tls.key)
    try:
        return context.wrap_socket(plain, server_hostname=host)
    except TimeoutError as error:
        raise NetworkError("no answer to the TLS handshake; is it a tcp endpoint?") from error


def _wait_for_verdict(encrypted: ssl.SSLSocket) -> None:
    encrypted.settimeout(_VERDICT_SECONDS)
    try:
        if encrypted.recv(1) == b"":
            raise NetworkError("it closed the connection after the handshake")
    except TimeoutError:
        pass  # the peer waits for our data, so it has accepted the certificate


def _name(encrypted: ssl.SSLSocket) -> str:
    der = encrypted.getpeercert(binary_form=True)
    assert der is not None  # the context requires one
    return common_name(x509.load_der_x509_certificate(der).subject)


def _reason(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in reason:
        return f"it rejects our certificate ({reason})"
    return f"does it use TLS? ({reason})"
