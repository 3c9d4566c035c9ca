"""Bare zenoh sessions with the keys of workers, which may mean harm."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import zenoh

from edgegossip.contract.protocol import Rank
from edgegossip.net.identity.access import zenoh_security
from edgegossip.net.identity.certificates import Holder
from edgegossip.net.identity.tls import TLS
from edgegossip.real.launch import free_ports

NUM_WORKERS = 3
RUN = "0123456789abcdef"


def wait_until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


class Worker:
    """A bare zenoh session with the keys of a worker.

    Args:
        folder: Of certificates.
        rank: Whose certificate and inbox it has, if it is a worker.
        connect: Endpoints of others.
        run: Name of its run.
        is_careful: Whether it has access control itself; whoever means harm has not.
        zenoh_id: Of its session; by default random.
        mode: Of its session.
    """

    def __init__(
        self,
        folder: Path,
        rank: Holder,
        *connect: str,
        run: str = RUN,
        is_careful: bool = True,
        zenoh_id: object = None,
        mode: str = "peer",
    ) -> None:
        self.rank, self.prefix = rank, f"edgegossip/{run}"
        self.endpoint = f"tls/127.0.0.1:{free_ports(1)[0]}"
        security = zenoh_security(TLS.from_folder(folder, rank).check(rank), run, NUM_WORKERS)
        if not is_careful:
            del security["access_control"]
        config = zenoh.Config()
        if zenoh_id is not None:
            security["id"] = str(zenoh_id)
        for key, value in {
            **security,
            "mode": mode,
            "scouting/multicast/enabled": False,
            "scouting/delay": 0,
            # Off where another machine takes part; it would keep impostors out by chance.
            "transport/shared_memory/enabled": False,
            "listen/endpoints": [self.endpoint],
            "connect/endpoints": connect,
        }.items():
            config.insert_json5(key, json.dumps(value))
        self.session = zenoh.open(config)
        self.received: list[tuple[str, bytes]] = []
        self.alive: list[str] = []
        self.watch(f"{self.prefix}/data/{rank}/*")
        self.session.liveliness().declare_subscriber(
            f"{self.prefix}/alive/*/*",
            lambda sample: self.alive.append(str(sample.key_expr)[len(self.prefix) :]),
            history=True,
        )
        self.token = self.session.liveliness().declare_token(f"{self.prefix}/alive/{rank}/7")

    def watch(self, keys: str) -> None:
        self.session.declare_subscriber(
            keys,
            lambda sample: self.received.append(
                (str(sample.key_expr)[len(self.prefix) :], sample.payload.to_bytes())
            ),
        )

    def send(self, receiver: object, payload: bytes, sender: object = None) -> None:
        sender = self.rank if sender is None else sender
        self.session.put(f"{self.prefix}/data/{receiver}/{sender}", payload)

    def sees(self, *ranks: Rank) -> bool:
        return all(f"/alive/{rank}/7" in self.alive for rank in ranks)
