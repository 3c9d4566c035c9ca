"""Access control on each link: only messages from the rank named in the certificate pass."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from edgegossip.net.identity.certificates import OBSERVER, Holder, holder_name
from edgegossip.net.identity.tls import Credentials

STATUS = "edgegossip/*/status/*"
"""Keys at which the workers of all runs answer observers."""
_Rule: TypeAlias = dict[str, object]


class _Keys(NamedTuple):
    """Run names in permitted keys: for messages, and for liveliness tokens."""

    data_runs: tuple[str, ...]
    alive_runs: tuple[str, ...]

    def data(self, rest: str) -> list[str]:
        return [f"edgegossip/{run}/data/{rest}" for run in self.data_runs]

    def status(self, rank: str) -> list[str]:
        return [f"edgegossip/{run}/status/{rank}" for run in self.data_runs]

    def alive(self, rest: str) -> list[str]:
        return [f"edgegossip/{run}/alive/{rest}" for run in self.alive_runs]


def bound_name(run: str) -> str:
    """The part of a run's name that certificates can be bound to.

    >>> bound_name("night:0123456789abcdef"), bound_name("mine")
    ('night', 'mine')
    """
    return run.partition(":")[0]


def known_holders(num_workers: int, run_names: Sequence[str]) -> dict[str, Holder]:
    """Common names of the permitted certificates, with their holders.

    Args:
        num_workers: Number of workers in the run.
        run_names: Names of runs whose bound certificates are valid; unbound certificates
            always are.
    """
    return {
        holder_name(rank, name): rank
        for rank in (*range(num_workers), None, OBSERVER)
        for name in (None, *run_names)
    }


def zenoh_security(
    credentials: Credentials,
    run: str,
    num_workers: int,
    run_names: Sequence[str] | None = None,
    *,
    is_observer: bool = False,
) -> dict[str, object]:
    """Zenoh settings that let a worker speak only for its own rank.

    Both ends of every link check this, by the common name in the other end's certificate:
    worker R can send messages from R, subscribe to the inbox of R, receive messages to R, and
    declare itself alive as R. Everything else is dropped. A router relays messages, so it may
    speak for all workers, but it holds each worker to the same rules. An observer can only ask
    workers for their status; it gets no message and no sign of life. Workers relay questions
    and answers, so an observer believes the worker or router that it is linked with.

    Host names are not compared, because certificates would then need all names and addresses
    that discovery may find. An impostor with another worker's certificate gets only that
    worker's messages, from any machine.

    A certificate that is bound to a run has a different common name, which is unknown in other
    runs. Files are passed by content, so that the validated contents are used even if a file is
    replaced in the meantime.

    Args:
        credentials: Credentials of this worker or router.
        run: Name of the run in the keys, or "*" for a router or an observer, which has part in
            all runs. Messages go to `edgegossip/RUN/data/RECEIVER/SENDER`; tokens are
            `edgegossip/RUN/alive/RANK/N`; status is asked for at `edgegossip/RUN/status/RANK`.
        num_workers: Number of workers in the run.
        run_names: Names of runs whose bound certificates are valid; only routers and observers
            may have several.
        is_observer: Whether these are an observer's settings: what it is told may come from any
            worker over any link.

    Returns:
        Values for zenoh's configuration, by key.
    """
    identity = credentials.identity
    certificate, key = _base64(identity.certificate), _base64(identity.key)
    # Tokens of other runs are readable, so that a worker can report those runs.
    runs: dict[str | None, _Keys] = {None: _Keys((run,), ("*",))}
    for name in [bound_name(run)] if run_names is None else run_names:
        named = (name, f"{name}:$*")
        runs[name] = _Keys((run,) if run_names is None else named, named)
    return {
        # Discovery could otherwise lead to a plain link.
        "transport/link/protocols": ["tls"],
        # A second link of a session has the rights of the first. With more than one link
        # allowed, zenoh verifies by a key of its own that both belong to one session. With a
        # single one, an attacker could take over the id of a called session and its link.
        "transport/unicast/max_links": 2,
        "transport/link/tls": {
            "root_ca_certificate_base64": _base64(credentials.anchors()),
            "enable_mtls": True,
            "listen_certificate_base64": certificate,
            "listen_private_key_base64": key,
            "connect_certificate_base64": certificate,
            "connect_private_key_base64": key,
            "verify_name_on_connect": False,
            "close_link_on_expiration": True,
        },
        "access_control": _access_control(runs, num_workers, is_observer=is_observer),
    }


def _access_control(
    runs: Mapping[str | None, _Keys], num_workers: int, *, is_observer: bool
) -> dict[str, object]:
    rules, held = list[_Rule](), dict[str, list[_Rule]]()
    answers = ["reply", "declare_queryable"]
    both, watch = ["ingress", "egress"], ["declare_liveliness_subscriber", "liveliness_query"]
    for run_name, keys in runs.items():
        # A name that differs from any holder's, so that the rules of the two are never
        # confused.
        where = "any run" if run_name is None else f"run {run_name}"
        common = [
            # Signs of life of all runs may be watched: a worker reports those of other runs.
            _allow(f"watch in {where}", both, watch, ["edgegossip/*/alive/**"]),
            _allow(f"alive in {where}", ["egress"], ["liveliness_token"], keys.alive("*/*")),
            _allow(f"inbox in {where}", ["egress"], ["declare_subscriber"], keys.data("*/*")),
            _allow(f"ask in {where}", both, ["query"], [STATUS]),
            _allow(f"answer in {where}", ["egress"], answers, keys.status("*")),
        ]
        rules += common
        for rank in (*range(num_workers), None):
            name, own_rank = holder_name(rank, run_name), "*" if rank is None else str(rank)
            own_status = keys.status("*" if is_observer else own_rank)
            own_alive, own_inbox = keys.alive(f"{own_rank}/*"), keys.data(f"{own_rank}/*")
            # Each rule speaks of the other end of a link: what comes from it must name its
            # rank, and only what is for its rank goes to it.
            own = [
                _allow(f"alive {name}", ["ingress"], ["liveliness_token"], own_alive),
                _allow(f"inbox {name}", ["ingress"], ["declare_subscriber"], own_inbox),
                _allow(f"from {name}", ["ingress"], ["put"], keys.data(f"*/{own_rank}")),
                _allow(f"to {name}", ["egress"], ["put"], own_inbox),
                _allow(f"status {name}", ["ingress"], answers, own_status),
            ]
            rules += own
            held[name] = [*common, *own]
        observer = holder_name(OBSERVER, run_name)
        asks = _allow(f"ask {observer}", ["ingress"], ["query"], [STATUS])
        rules.append(asks)
        held[observer] = [asks, common[-1]]
    return {
        "enabled": True,
        "default_permission": "deny",
        "rules": rules,
        "subjects": [{"id": name, "cert_common_names": [name]} for name in held],
        "policies": [
            {"subjects": [name], "rules": [rule["id"] for rule in own]}
            for name, own in held.items()
        ],
    }


def _allow(name: str, flows: list[str], messages: list[str], keys: list[str]) -> _Rule:
    return {
        "id": name,
        "permission": "allow",
        "flows": flows,
        "messages": messages,
        "key_exprs": keys,
    }


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
