"""Lists of real machines in TOML files."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgegossip.contract.errors import UsageError
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_ranges
from edgegossip.machine.energy import (
    BUSY_WATTS,
    IDLE_WATTS,
    JOULES_PER_BYTE,
    check_watts,
)
from edgegossip.machine.predictor import SlowDown
from edgegossip.machine.profile import Profile
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

_MEGABIT = 125_000.0
_JOULES_PER_MB = round(1e6 * JOULES_PER_BYTE, 9)
_TEXTS = ("name", "profile", "endpoint")
_ENERGY = ("idle_watts", "busy_watts", "joules_per_mb_sent", "joules_per_mb_received")
_COSTS = ("ms_per_training", "ms_per_message", "ms_per_mb")
_NUMBERS = ("speed", "samples_per_second", "mbits", "latency_ms", *_COSTS, *_ENERGY)
_KEYS = ("name", "count", *_NUMBERS, "profile", "endpoint")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine.

    Args:
        name: Name for reports and messages.
        speed: Speed relative to the local machine, above 0; used without `samples_per_second`.
        samples_per_second: Training samples per second of the task's model, above 0; None for
            `speed` times the local machine's measured speed.
        mbits: Maximum Mbit/s in each direction, above 0.
        latency_ms: Milliseconds to the network, at least 0; a message between two machines
            takes the sum of their latencies.
        ms_per_training: Milliseconds in which the machine begins and ends a training, whatever
            its length, at least 0.
        ms_per_message: Milliseconds of training that a message of any size takes from the
            machine when it is sent, and when it is received, at least 0.
        ms_per_mb: Milliseconds of training that 1 MB (a million bytes) takes from the machine
            when it is sent, and when it is received, in addition, at least 0.
        idle_watts: Power of the whole machine while it is on and does not work, at least 0; by
            default, like the next three, that of a Raspberry Pi 4 with Wi-Fi.
        busy_watts: Power while it works, at least `idle_watts`.
        joules_per_mb_sent: Joules that the machine takes to send 1 MB (a million bytes), in
            addition to its idle power, at least 0.
        joules_per_mb_received: Joules that it takes to receive 1 MB, at least 0; a message
            between two machines takes the sum of sending and receiving.
        endpoint: Endpoint at which other machines reach this machine, such as tls/desk:7447;
            None if unknown.

    Raises:
        ValueError: If a number is out of range.
    """

    name: str
    speed: float = 1.0
    samples_per_second: float | None = None
    mbits: float = math.inf
    latency_ms: float = 0.0
    ms_per_training: float = 0.0
    ms_per_message: float = 0.0
    ms_per_mb: float = 0.0
    idle_watts: float = IDLE_WATTS
    busy_watts: float = BUSY_WATTS
    joules_per_mb_sent: float = _JOULES_PER_MB / 2
    joules_per_mb_received: float = _JOULES_PER_MB / 2
    endpoint: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self, speed="above 0 and finite", mbits="above 0")
        check_ranges(self, samples_per_second="above 0 and finite, or None")
        check_ranges(self, latency_ms="in [0, inf)", ms_per_training="in [0, inf)")
        check_ranges(self, ms_per_message="in [0, inf)", ms_per_mb="in [0, inf)")
        check_watts(self.idle_watts, self.busy_watts)
        check_ranges(self, joules_per_mb_sent="in [0, inf) J")
        check_ranges(self, joules_per_mb_received="in [0, inf) J")

    @property
    def latency(self) -> Seconds:
        """Latency to the network, in seconds."""
        return self.latency_ms / 1000

    def platform(self, measured: float) -> Platform:
        """Make a platform like this machine; the local one trains `measured` samples/s."""
        throughput = self.samples_per_second or self.speed * measured
        bandwidth = self.mbits * _MEGABIT
        return Platform(
            name=self.name,
            throughput=throughput,
            uplink=bandwidth,
            downlink=bandwidth,
            seconds_per_training=self.ms_per_training / 1e3,
            seconds_per_byte=self.ms_per_mb / 1e9,
            seconds_per_message=self.ms_per_message / 1e3,
            idle_watts=self.idle_watts,
            busy_watts=self.busy_watts,
        )


def read_machines(path: Path) -> tuple[Machine, ...]:
    """Read the machines of a TOML file, in order of their ranks.

    Each machine is a table ``[[machine]]`` with the arguments of `Machine`, and `count` for
    several equal machines. `profile` names a file of `edgegossip profile`, from which the speed
    is read; its path is relative to the TOML file.

    Raises:
        UsageError: If the file cannot be read, or its contents are invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read machines from {path}: {error}") from error
    tables = content.get("machine")
    if not isinstance(tables, list) or not tables or [*content] != ["machine"]:
        raise UsageError(
            f"{path} must list machines as [[machine]] tables and nothing else; it has "
            f"{', '.join(content) or 'nothing'}"
        )
    return tuple(machine for table in tables for machine in _machines(path, table))


def _machines(path: Path, table: Mapping[str, Any]) -> Sequence[Machine]:
    if unknown := [key for key in table if key not in _KEYS]:
        raise UsageError(
            f"{path}: a machine has no {unknown[0]!r}; it may have {', '.join(_KEYS)}"
        )
    values = {"name": "machine", **table}
    count = values.pop("count", 1)
    wrong = [
        key
        for key, value in values.items()
        if not isinstance(value, str if key in _TEXTS else int | float)
    ]
    if wrong or not isinstance(count, int) or count < 1:
        key = wrong[0] if wrong else "count"
        allowed = "a text in quotes" if key in _TEXTS else "a number"
        raise UsageError(
            f"{path}: {key} of {values['name']!r} must be {allowed}, got {table[key]!r}"
        )
    profile = values.pop("profile", None)
    if profile is not None:
        if "samples_per_second" in values:
            raise UsageError(
                f"{path}: {values['name']!r} has samples_per_second and a profile; leave out "
                "one of them"
            )
        slow_down = SlowDown(Profile.read(path.parent / profile), None)
        values["samples_per_second"] = 1 / slow_down.seconds_alone
    try:
        return [Machine(**values)] * count
    except ValueError as error:
        raise UsageError(f"{path}: {values['name']!r}: {error}") from error


def machines_text(machines: Sequence[Machine], notes: Sequence[str] = ()) -> str:
    """The content of a TOML file for `read_machines`; defaults are left out.

    Args:
        machines: One for each rank, in order.
        notes: A line for each machine, which becomes a comment; none by default.

    >>> print(machines_text([Machine(name="desk", samples_per_second=1e3)], ["measured"]))
    # measured
    [[machine]]
    name = "desk"
    samples_per_second = 1000.0
    <BLANKLINE>
    """
    tables = []
    for index, machine in enumerate(machines):
        defaults = asdict(Machine(name=""))
        given = {key: x for key, x in asdict(machine).items() if x != defaults[key]}
        comments = [f"# {notes[index]}"] if notes else []
        lines = [f"{key} = {json.dumps(x, ensure_ascii=False)}" for key, x in given.items()]
        tables.append("\n".join([*comments, "[[machine]]", *lines, ""]))
    return "\n".join(tables)


def links_between(machines: Sequence[Machine]) -> Links:
    """Link each pair of machines; latency and energy are the sums of the two machines' own."""
    pairs: dict[tuple[Rank, Rank], Link] = {
        (i, j): Link(
            latency=one.latency + other.latency,
            joules_per_byte=(one.joules_per_mb_sent + other.joules_per_mb_received) / 1e6,
        )
        for i, one in enumerate(machines)
        for j, other in enumerate(machines)
        if i != j
    }
    return Links(default=Link(), overrides=pairs)
