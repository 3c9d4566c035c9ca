"""Hosts with speeds, links and faults of their own, on one Linux machine."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

from lab import machine
from lab.machine import LabError
from lab.network import Network
from lab.relay import Shape

Hosts: TypeAlias = int | Iterable[int]
Process: TypeAlias = "subprocess.Popen[Any]"

GOODPUT = 1448 / 1514
"""Share of a link's bytes that TCP hands over; the rest are headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The resources that one host gets.

    Args:
        cpu: Cores that all its processes together may use, at least 0.05; None for no limit.
            With one or less they stay on one core, because most of a slice that a second core
            takes from so small a quota would be lost.
        bandwidth: Bytes per second, each way, of frames with their headers; None for no limit.
        latency: Seconds from the host to the switch, and as many back.
        shape: A cable that loses frames, is down at times or follows a trace; with its own
            latency, in place of `latency`.
        is_behind_nat: Whether a home router is in between: others see the router's address,
            and cannot call the host. It needs the command nft.

    Raises:
        ValueError: If a number is out of range.
    """

    cpu: float | None = None
    bandwidth: float | None = None
    latency: float = 0.0
    is_behind_nat: bool = False
    shape: Shape | None = None

    def __post_init__(self) -> None:
        if self.cpu is not None and not self.cpu >= 0.05:
            raise ValueError(f"cpu must be at least 0.05 cores, got {self.cpu}")
        if self.bandwidth is not None and not self.bandwidth >= 1e4:
            raise ValueError(f"bandwidth must be at least 1e4 bytes/s, got {self.bandwidth}")
        if not 0 <= self.latency < 10:
            raise ValueError(f"latency must be in [0, 10) seconds, got {self.latency}")


class Lab:
    """Hosts that reach nothing but each other, from `with` to the end of its block.

    Each host is a network namespace with a cable (a veth pair) to a switch (a bridge in a
    namespace of its own), and a control group. The machine's own network is left alone.

    Args:
        hosts: One for each host; at most 250.

    Attributes:
        hosts: As given.
        addresses: Of the hosts; of the home router where a host is behind one.

    Raises:
        LabError: On entering, if the machine lacks something or refuses it.
    """

    def __init__(self, hosts: Sequence[HostSpec]) -> None:
        if not 1 <= len(hosts) <= 250:
            raise ValueError(f"a lab has 1 to 250 hosts, got {len(hosts)}")
        self.hosts = tuple(hosts)
        self._cores = machine.share_out([host.cpu for host in hosts])
        self._name = machine.new_name()
        self._network = Network(self._name, len(hosts))
        self.addresses = self._network.addresses
        self._started: dict[int, Callable[[], Process]] = {}
        self._children: list[Process] = []

    def __enter__(self) -> Lab:
        if lacks := machine.missing():
            raise LabError(f"a lab needs what is missing here: {', '.join(lacks)}")
        machine.remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes, remove all that was made; Ctrl+C waits until that is done."""
        signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            machine.remove(self._name)
            for child in self._children:
                child.wait()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # Processes.

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output: IO[Any] | int | None = None,
    ) -> Process:
        """Run `command` on `host`.

        Args:
            host: Counted from 0.
            command: With its arguments; the file system is the machine's own.
            env: Environment; None for that of the caller.
            cwd: Working directory; None for that of the caller.
            output: Takes what it prints, errors too: a file, or `subprocess.PIPE`.
        """
        self._require(host)
        self._started[host] = partial(
            self.start, host, command, env=env, cwd=cwd, output=output
        )
        namespace, group = self._network.hosts[host], self._group(f"host{host}")
        core = self._cores[host]
        pinned = command if core is None else ["taskset", "-c", str(core), *command]
        return self._spawn(namespace, group, pinned, env=env, cwd=cwd, output=output)

    def kill(self, host: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to all processes on `host`; after SIGKILL none is left."""
        self._require(host)
        if number == signal.SIGKILL:
            machine.kill_all(self._group(f"host{host}"))
            return
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def restart(self, host: int) -> Process:
        """Kill what runs on `host`, and run the command again that was started there last."""
        if host not in self._started:
            raise LabError(f"nothing was started on host {host} yet; start a command there")
        self.kill(host)
        return self._started[host]()

    def processes(self, host: int) -> list[int]:
        """Ids of the processes on `host`."""
        return machine.processes(self._group(f"host{host}"))

    def traffic(self, host: int) -> tuple[int, int]:
        """Bytes that `host` has sent and received so far.

        Some headers are missing: of frames that the kernel handed over in one bundle it counts
        one.
        """
        self._require(host)
        return self._network.traffic(host)

    # Faults of the network.

    def cut(self, some: Hosts, others: Hosts) -> None:
        """Lose all that passes between `some` hosts and the `others`, without a word to either.

        As if a cable between two switches were pulled: the hosts' own links stay up.
        """
        for one, other in self._pairs(some, others):
            self._network.cut(one, other)
            self._network.cut(other, one)

    def mend(self, some: Hosts | None = None, others: Hosts | None = None) -> None:
        """Undo `cut` between `some` and the `others`, by default between all."""
        everyone = range(len(self.hosts))
        for one, other in self._pairs(
            everyone if some is None else some, everyone if others is None else others
        ):
            self._network.mend(one, other)
            self._network.mend(other, one)

    # Building.

    def _build(self) -> None:
        self._network.build()
        # Every group but the root may hold either processes or groups, not both.
        machine.make_group(self._group())
        machine.prefer(self._group())
        machine.make_group(self._group("switch"))
        for host, spec in enumerate(self.hosts):
            group = self._group(f"host{host}")
            machine.make_group(group)
            if spec.cpu is not None:
                machine.set_quota(group, spec.cpu)
            if spec.is_behind_nat:
                self._network.hide(host)
            if spec.bandwidth is not None:
                self._network.limit(host, spec.bandwidth)
            if spec.shape is not None or spec.latency:
                self._insert_relay(host, spec.shape or Shape(latency=spec.latency))
        if any(spec.shape is not None and spec.shape.counts_frames for spec in self.hosts):
            self._network.unbundle()

    def _insert_relay(self, host: int, shape: Shape) -> None:
        ends = self._network.insert_relay(host)
        script = str(Path(__file__).with_name("relay.py"))
        relay = [sys.executable, script, *ends, shape.text()]
        group = self._group("switch")
        child = self._spawn(self._network.switch, group, relay, output=subprocess.PIPE)
        assert child.stdout is not None
        with child.stdout as output:
            if (said := output.readline()) != b"ready\n":
                raise LabError(f"the relay of host {host} does not start: {said.decode()}")

    def _spawn(
        self,
        namespace: str,
        group: Path,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output: IO[Any] | int | None = None,
    ) -> Process:
        # Shells and `ip` become the command, which so has the process id that we know.
        join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
        # Zenoh for one would pass messages through memory that hosts share, not the network.
        alone = ["sh", "-c", 'mount -t tmpfs "$0" /dev/shm && exec "$@"', "tmpfs"]
        child = subprocess.Popen(
            [*join, "ip", "netns", "exec", namespace, *alone, *command],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,  # Ctrl+C goes to whoever made the lab, not to the hosts
        )
        self._children.append(child)
        return child

    def _group(self, name: str = "") -> Path:
        root = machine.cgroup_root()
        if root is None:
            raise LabError("there are no cgroups with quotas here")
        return root / self._name / name

    def _require(self, host: int) -> None:
        if not 0 <= host < len(self.hosts):
            raise LabError(f"there is no host {host}; hosts are 0..{len(self.hosts) - 1}")

    def _pairs(self, some: Hosts, others: Hosts) -> list[tuple[int, int]]:
        groups = [
            [hosts] if isinstance(hosts, int) else list(hosts) for hosts in (some, others)
        ]
        for host in itertools.chain(*groups):
            self._require(host)
        return [(one, other) for one, other in itertools.product(*groups) if one != other]
