"""A switch and its cables, each end in a namespace of its own."""

from __future__ import annotations

import json

from lab.machine import call, drop_filter

BURST_SECONDS = 0.0025
"""How much a link that was idle may pass at once. Short against messages, or they would pass
too fast; not much shorter than the kernel's timers are late, or links would not be used up."""
QUEUE_SECONDS = 0.2
"""Time that a full queue of a limited link takes to pass; further frames are dropped."""
HOME_ROUTER = """
table ip home {
    chain out { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
    chain through { type filter hook forward priority 0; iifname "eth0" ct state new drop; }
    chain at { type filter hook input priority 0; iifname "eth0" ct state new drop; }
}
"""
"""Rules of nftables, as home routers have them."""
FRAME = 1514
"""Bytes of the largest frame."""


class Network:
    """Hosts around a switch, which is a bridge in its own namespace.

    Args:
        name: Of the lab; begins the names of the namespaces.
        num_hosts: At most 250.
    """

    def __init__(self, name: str, num_hosts: int) -> None:
        self.switch = f"{name}-switch"
        self.hosts = [f"{name}-host{host}" for host in range(num_hosts)]
        self.addresses = [f"10.77.0.{host + 1}" for host in range(num_hosts)]
        self._gates: dict[int, str] = {}
        self._cuts: set[tuple[int, int]] = set()

    def build(self) -> None:
        """Make the switch, a sink for what is thrown away, and the cables."""
        call("ip", "netns", "add", self.switch)
        self._ip(self.switch, "link add switch type bridge")
        self._ip(self.switch, "link add sink type veth peer name drain")
        for interface in ("switch", "sink", "drain"):
            self._ip(self.switch, f"link set {interface} up")
        for host, namespace in enumerate(self.hosts):
            call("ip", "netns", "add", namespace)
            # Both ends are born where they belong, never in the machine's own network.
            call(
                *("ip", "link", "add", "eth0", "netns", namespace, "address", _hardware(host)),
                *("type", "veth", "peer", "name", f"port{host}", "netns", self.switch),
            )
            self._ip(namespace, f"address add {self.addresses[host]}/24 dev eth0")
            self._ip(namespace, "link set lo up")
            self._ip(namespace, "link set eth0 up")
            self._ip(self.switch, f"link set port{host} master switch up")
            call("tc", "-n", self.switch, "qdisc", "add", "dev", f"port{host}", "clsact")

    def hide(self, host: int) -> None:
        """Put `host` behind a home router, which translates addresses and lets nobody call in.

        The router gets the host's cable and its address; the host gets a private one.
        """
        name, gate = self.hosts[host], f"{self.hosts[host]}-gate"
        self._gates[host] = gate
        call("ip", "netns", "add", gate)
        self._ip(name, f"link set eth0 netns {gate}")  # it loses its address on the way
        self._ip(gate, f"address add {self.addresses[host]}/24 dev eth0")
        self._ip(gate, "link set lo up")
        self._ip(gate, "link set eth0 up")
        call(
            "ip",
            "link",
            "add",
            "eth0",
            "netns",
            name,
            "type",
            "veth",
            "peer",
            "name",
            "home",
            "netns",
            gate,
        )
        self._ip(gate, "address add 192.168.77.1/24 dev home")
        self._ip(gate, "link set home up")
        self._ip(name, "address add 192.168.77.2/24 dev eth0")
        self._ip(name, "link set eth0 up")
        self._ip(name, "route add default via 192.168.77.1")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        call("ip", "netns", "exec", gate, "sh", "-c", forward)
        call("ip", "netns", "exec", gate, "nft", HOME_ROUTER)

    def limit(self, host: int, bandwidth: float) -> None:
        """Let at most `bandwidth` bytes/s pass the cable of `host`, each way."""
        burst = max(4 * FRAME, round(BURST_SECONDS * bandwidth))
        limit = burst + round(QUEUE_SECONDS * bandwidth)
        for namespace, interface in (
            (self._at_the_cable(host), "eth0"),
            (self.switch, f"port{host}"),
        ):
            call(
                *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf"),
                *("rate", f"{round(8 * bandwidth)}bit", "burst", str(burst)),
                *("limit", str(limit)),
            )

    def insert_relay(self, host: int) -> tuple[str, str]:
        """Cut the cable of `host` from the switch; returns the loose ends, for a relay."""
        loose, plug = f"loose{host}", f"plug{host}"
        self._ip(self.switch, f"link add {plug} type veth peer name {loose}")
        self._ip(self.switch, f"link set port{host} nomaster")
        self._ip(self.switch, f"link set {plug} master switch up")
        self._ip(self.switch, f"link set {loose} up")
        return f"port{host}", loose

    def unbundle(self) -> None:
        """Let all hosts send single frames, not bundles that their cards would take apart."""
        for host, namespace in enumerate(self.hosts):
            self._ip(self._at_the_cable(host), "link set eth0 gso_max_segs 1 gso_max_size 1514")
            self._ip(namespace, "link set eth0 gso_max_segs 1 gso_max_size 1514")

    def cut(self, sender: int, receiver: int) -> None:
        """Throw away all that `sender` sends to `receiver` on its way out of the switch."""
        if (sender, receiver) not in self._cuts:
            port = f"port{receiver}"
            call(*drop_filter(self.switch, port, sender + 1, _hardware(sender), "sink"))
            self._cuts.add((sender, receiver))

    def mend(self, sender: int, receiver: int) -> None:
        """Undo `cut`."""
        if (sender, receiver) in self._cuts:
            where = ("dev", f"port{receiver}", "egress", "pref", str(sender + 1))
            call("tc", "-n", self.switch, "filter", "delete", *where)
            self._cuts.discard((sender, receiver))

    def traffic(self, host: int) -> tuple[int, int]:
        """Bytes that `host` has sent and received."""
        shown = call("ip", "-n", self._at_the_cable(host), "-s", "-j", "link", "show", "eth0")
        counted = json.loads(shown)[0]["stats64"]
        return int(counted["tx"]["bytes"]), int(counted["rx"]["bytes"])

    def _at_the_cable(self, host: int) -> str:
        return self._gates.get(host, self.hosts[host])

    def _ip(self, namespace: str, command: str) -> None:
        call("ip", "-n", namespace, *command.split())


def _hardware(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"
