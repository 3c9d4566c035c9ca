"""Run one command on each of several hosts, as root.

    python -m lab.run --hosts 4 --cpu 0.6 0.48 0.2 0.15 --mbit 100 100 50 20 \\
        --at "20 kill 1" --at "25 restart 1" --at "30 cut 0,1 2,3" --at "60 mend" \\
        -- COMMAND --rank {rank} --listen tcp/{address}:7447 --connect tcp/{address0}:7447

In the command, {rank} is the host's number, {address} its address, {address0} that of host 0,
and so on. `--cpu` are cores, `--mbit` Mbit/s each way, `--latency` milliseconds to the switch;
the last value counts for all hosts that are left. Where no lab can be made, says why and
exits with 0.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from lab.lab import HostSpec, Lab, Process
from lab.machine import missing

FORMS = "kill H, stop H, continue H, restart H, cut H H, mend (H: a host or several, 0,1,2)"
NUM_GROUPS = {"kill": 1, "stop": 1, "continue": 1, "restart": 1, "cut": 2, "mend": 0}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """An event `at` seconds after the start.

    >>> Fault.parse("30 cut 0,1 2")
    Fault(at=30.0, action='cut', hosts=((0, 1), (2,)))
    """

    at: float
    action: str
    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read "SECONDS ACTION [HOST,HOST...]..."."""
        try:
            at, action, *groups = text.split()
            hosts = tuple(tuple(map(int, group.split(","))) for group in groups)
            if len(hosts) != NUM_GROUPS[action]:
                raise ValueError(action)
            return cls(float(at), action, hosts)
        except (LookupError, ValueError) as error:
            raise argparse.ArgumentTypeError(
                f"got {text!r}; after the seconds, allowed are {FORMS}"
            ) from error


def fill(command: Sequence[str], rank: int, addresses: Sequence[str]) -> list[str]:
    """Put a host's number and the addresses into a command.

    >>> fill(["{rank}", "tcp/{address}:1", "{address0}"], 1, ["10.0.0.1", "10.0.0.2"])
    ['1', 'tcp/10.0.0.2:1', '10.0.0.1']
    """
    values = {"{rank}": str(rank), "{address}": addresses[rank]}
    values |= {f"{{address{other}}}": address for other, address in enumerate(addresses)}
    filled = list(command)
    for name, value in values.items():
        filled = [word.replace(name, value) for word in filled]
    return filled


class Session:
    """The commands that run on the hosts, and what they print."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._children: dict[int, Process] = {}
        self._readers: list[threading.Thread] = []
        self._killed: set[int] = set()

    def start(self, command: Sequence[str]) -> None:
        for host in range(len(self._lab.hosts)):
            filled = fill(command, host, self._lab.addresses)
            self._follow(host, self._lab.start(host, filled, output=subprocess.PIPE))

    def carry_out(self, fault: Fault) -> None:
        hosts = [host for group in fault.hosts for host in group]
        match fault.action:
            case "cut":
                self._lab.cut(*fault.hosts)
            case "mend":
                self._lab.mend()
            case "restart":
                for host in hosts:
                    self._follow(host, self._lab.restart(host))
            case action:
                for host in hosts:
                    self._lab.kill(host, SIGNALS[action])
                self._killed |= set(hosts) if action == "kill" else set()

    def is_over(self) -> bool:
        return all(child.poll() is not None for child in self._children.values())

    def failed(self) -> list[int]:
        """Hosts whose command failed, other than by a fault of ours."""
        codes = {host: child.wait() for host, child in self._children.items()}
        for reader in self._readers:
            reader.join()
        return [host for host, code in codes.items() if code and host not in self._killed]

    def _follow(self, host: int, child: Process) -> None:
        self._killed.discard(host)
        self._children[host] = child
        reader = threading.Thread(target=_show, args=(host, child), daemon=True)
        reader.start()
        self._readers.append(reader)


def _show(host: int, child: Process) -> None:
    for line in child.stdout or ():
        sys.stdout.write(f"[{host}] {line.decode(errors='replace')}")
        sys.stdout.flush()


def specs(options: argparse.Namespace) -> list[HostSpec]:
    """One for each host; the last value of an option counts for all hosts that are left."""

    def value(given: list[float] | None, host: int) -> float | None:
        return given[min(host, len(given) - 1)] if given else None

    mbits = [value(options.mbit, host) for host in range(options.hosts)]
    return [
        HostSpec(
            cpu=value(options.cpu, host),
            bandwidth=None if mbit is None else mbit * 1e6 / 8,
            latency=(value(options.latency, host) or 0.0) / 1000,
        )
        for host, mbit in enumerate(mbits)
    ]


def run(lab: Lab, command: Sequence[str], faults: Sequence[Fault]) -> list[int]:
    """Run `command` on all hosts to its end, with faults; returns where it failed."""
    session, started, due = Session(lab), time.monotonic(), sorted(faults)
    session.start(command)
    while not session.is_over() or any(fault.action == "restart" for fault in due):
        while due and time.monotonic() - started >= due[0].at:
            print(f"[lab] {due[0].action} {due[0].hosts}", flush=True)
            session.carry_out(due.pop(0))
        time.sleep(0.05)
    return session.failed()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    for name in ("cpu", "mbit", "latency"):
        parser.add_argument(f"--{name}", type=float, nargs="+")
    parser.add_argument("--at", type=Fault.parse, action="append", default=[])
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if lacks := missing():
        print(f"no lab here, as this is missing: {'; '.join(lacks)}")
        return 0
    signal.signal(signal.SIGTERM, _stop)
    with Lab(specs(options)) as lab:
        if failed := run(lab, options.command, options.at):
            print(f"the command failed on hosts {failed}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
