"""Introductions that workers exchange when they meet; only equal settings can run together."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import torch

from edgegossip.contract.errors import NetworkError
from edgegossip.contract.protocol import Message, Rank
from edgegossip.contract.schema import MessageSpec, TensorSpec

_LOG = logging.getLogger("edgegossip.net")
INTRODUCTION = "net/introduction"
PROTOCOL = 5
"""Version of the protocol; it increases when the meaning of a message changes."""
MAX_BYTES = 2**16
MAX_TEXT = 60
"""Length of a text beyond which only its hash is compared."""
_MAX_NAMED = 3
_TOLERANCE = 1e-3

Setting: TypeAlias = "bool | int | float | str | Sequence[float] | None"
"""A plain value, or a sketch: numbers that are compared approximately. An empty sketch, of a
value that could not be computed, agrees with all sketches."""
SPEC = MessageSpec({"text": TensorSpec(torch.uint8, (None,), max_numel=MAX_BYTES)})


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """A worker's description of its run.

    Args:
        settings: Settings by name; equal among all workers of a run.
        versions: Versions and other values by name; differences only cause a warning.
    """

    settings: Mapping[str, Setting] = field(default_factory=dict)
    versions: Mapping[str, Setting] = field(default_factory=dict)

    def text(self) -> str:
        """The introduction as JSON of at most `MAX_BYTES`; hashes replace long values."""
        settings = {"network protocol": PROTOCOL, **self.settings}
        short = {
            name: _hash(value) if isinstance(value, str) and len(value) > MAX_TEXT else value
            for name, value in settings.items()
        }
        text = json.dumps([short, dict(self.versions)])
        # A message has a limit. Hashes of groups still tell which group differs.
        if len(text) <= MAX_BYTES:
            return text
        groups: dict[str, dict[str, object]] = {}
        for name, value in short.items():
            groups.setdefault(name.partition(".")[0], {})[name] = value
        return json.dumps([{name: _hash(each) for name, each in groups.items()}, {}])

    def message(self) -> Message:
        """The introduction as a message; see `SPEC`."""
        text = torch.frombuffer(bytearray(self.text().encode()), dtype=torch.uint8)
        return Message(INTRODUCTION, 0, {"text": text})


class Introductions:
    """Compares the other workers' introductions with this worker's.

    A worker with different settings is always ignored. A worker outside the majority cannot
    begin; if the only two workers differ, neither can. Once a run has begun, no introduction
    can end a worker's run.

    Args:
        num_workers: Number of workers in the run.
        own: This worker's introduction.
    """

    def __init__(self, num_workers: int, own: Introduction) -> None:
        self._num_workers = num_workers
        self._settings, self._versions = json.loads(own.text())
        self._differences: dict[Rank, list[str]] = {}

    def forget(self, rank: Rank) -> None:
        """Forget the introduction of `rank`, whose new process may have other settings."""
        self._differences.pop(rank, None)

    def take(self, rank: Rank, message: Message) -> None:
        """Compare the introduction of `rank`; warn about different versions."""
        try:
            settings, versions = _parse(message)
        except (ValueError, RecursionError):  # deeply nested JSON, too, is only a difference
            differences = ["an introduction that cannot be read"]
        else:
            differences = _differences(settings, self._settings)
            is_first = rank not in self._differences
            # Only once, and not where other settings already say that the two do not fit.
            others = _differences(versions, self._versions)
            if others and is_first and not differences:
                _LOG.warning(
                    "worker %d has %s: numbers may differ, which is allowed",
                    rank,
                    _list(others),
                )
        self._differences[rank] = differences

    def difference(self, rank: Rank) -> str:
        """Differences in the settings of `rank`, from its introduction; empty if none."""
        return _list(self._differences.get(rank, []))

    def require_majority(self, *, is_waiting: bool) -> None:
        """Check before the run begins that most workers have this worker's settings.

        Args:
            is_waiting: Whether workers without an introduction may still agree.

        Raises:
            NetworkError: If at least half of the workers have different settings; unless
                `is_waiting`, only this worker and introduced workers count.
        """
        # A tie is no majority: either half may be the one that is wrong.
        different = {rank: each for rank, each in self._differences.items() if each}
        present = self._num_workers if is_waiting else 1 + len(self._differences)
        if different and 2 * len(different) >= present:
            each = "; ".join(f"worker {r} has {_list(d)}" for r, d in sorted(different.items()))
            raise NetworkError(
                f"other workers take part in another run: {each}. Start all workers of a run "
                "with the same recipe, options and data; different runs need different "
                "names (--name)"
            )


def _parse(message: Message) -> tuple[dict[str, Setting], dict[str, Setting]]:
    # The schema has checked only that it is bytes; everything else is up to a stranger.
    told = json.loads(bytes(message.payload["text"].tolist()).decode())
    if not isinstance(told, list) or len(told) != 2:
        raise ValueError("no settings and versions")
    settings, versions = told
    for each in told:
        if not isinstance(each, dict) or not all(map(_is_setting, each.values())):
            raise ValueError("no settings by name")
    return settings, versions


def _is_setting(value: object) -> bool:
    if isinstance(value, list):
        # A whole number may be larger than any float.
        return all(
            isinstance(each, float) or (isinstance(each, int) and abs(each) < 2**63)
            for each in value
        )
    return value is None or isinstance(value, bool | int | float | str)


def _differences(others: Mapping[str, Setting], own: Mapping[str, Setting]) -> list[str]:
    """Describe each difference."""
    found = []
    # Own names first: what a liar adds cannot push them out of the few that are named.
    for name in {**own, **others}:
        theirs, ours = others.get(name), own.get(name)
        if not _agree(theirs, ours):
            shown = name if name in own else repr(name[:MAX_TEXT])
            if _is_opaque(theirs) or _is_opaque(ours):
                found.append(f"other {shown}")
            else:
                found.append(f"{shown} {_show(theirs)}, this one {_show(ours)}")
    return found


def _agree(one: Setting, other: Setting) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return not (one and other) or (
            len(one) == len(other)
            and all(
                math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
                for a, b in zip(one, other, strict=True)
            )
        )
    return type(one) is type(other) and one == other


def _is_opaque(value: Setting) -> bool:
    return isinstance(value, list) or (isinstance(value, str) and value.startswith("sha256:"))


def _show(value: Setting) -> str:
    text = "none" if value is None else json.dumps(value)  # JSON text has no line breaks
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def _list(differences: Sequence[str]) -> str:
    shown = "; ".join(islice(differences, _MAX_NAMED))
    more = len(differences) - _MAX_NAMED
    return f"{shown}; and {more} more that differ" if more > 0 else shown


def _hash(value: object) -> str:
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return f"sha256:{digest[:16]}"
