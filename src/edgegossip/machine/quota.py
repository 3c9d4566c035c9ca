"""The number of usable processor cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from edgegossip.contract.protocol import Seconds
from edgegossip.machine.system import usable_cores


def num_cores() -> int:
    """The number of cores that this process may use; outside Linux, the number of all cores."""
    return usable_cores() or os.cpu_count() or 1


# Quotas of Linux control groups and how much of them is used.


@dataclass(frozen=True, slots=True)
class Quota:
    """The tightest limit that our control group or its ancestors set on processor time.

    Attributes:
        cores: Core-seconds per second that the group may use, above 0.
        usage: File with the processor time that the group has used; None if there is none.
    """

    cores: float
    usage: Path | None

    def used(self) -> Seconds | None:
        """Core-seconds that the group has used; None if unknown."""
        if self.usage is None:
            return None
        with suppress(OSError, ValueError, LookupError):
            text = self.usage.read_text(encoding="utf-8")
            if self.usage.name == "cpuacct.usage":
                return int(text) * 1e-9
            return int(dict(line.split() for line in text.splitlines())["usage_usec"]) * 1e-6
        return None


def find_quota(root: Path = Path("/")) -> Quota | None:
    """The quota of this process; None without a quota, and outside Linux.

    Args:
        root: Folder that contains /proc and /sys.
    """
    quotas = [*_quotas_v1(root), *_quotas_v2(root)]
    return min(quotas, key=lambda quota: quota.cores, default=None)


def _quotas_v2(root: Path) -> Iterator[Quota]:
    for folder in _folders(root, "cgroup2", "").values():
        limit, _, period = _read(folder / "cpu.max").partition(" ")
        if limit not in ("", "max"):
            yield Quota(int(limit) / int(period), folder / "cpu.stat")


def _quotas_v1(root: Path) -> Iterator[Quota]:
    # Use is counted in a tree of its own, mostly but not always the one that has the quotas.
    accounts = _folders(root, "cgroup", "cpuacct")
    for path, folder in _folders(root, "cgroup", "cpu").items():
        limit = _read(folder / "cpu.cfs_quota_us")
        if limit not in ("", "-1"):
            cores = int(limit) / int(_read(folder / "cpu.cfs_period_us"))
            usage = accounts[path] / "cpuacct.usage" if path in accounts else None
            yield Quota(cores, usage)


def _folders(root: Path, kind: str, controller: str) -> dict[PurePosixPath, Path]:
    """The folders of our control group and its ancestors, by path."""
    group, mount = _group(root, controller), _mount(root, kind, controller)
    if group is None or mount is None:
        return {}
    folders = {path: mount / path.relative_to("/") for path in (group, *group.parents)}
    # In a container the outer path may be shown, while only the inner folders are mounted.
    return {path: folder for path, folder in folders.items() if folder.is_dir()}


def _group(root: Path, controller: str) -> PurePosixPath | None:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return PurePosixPath(path)
    return None


def _mount(root: Path, kind: str, controller: str) -> Path | None:
    for line in _read(root / "proc/self/mountinfo").splitlines():
        place, _, source = line.partition(" - ")
        found, _, options = source.split(" ", 2)
        if found == kind and (not controller or controller in options.split(",")):
            return root / place.split(" ")[4].lstrip("/")
    return None


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""
