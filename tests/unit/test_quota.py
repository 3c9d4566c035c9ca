"""Which quota binds us, found in trees of files as Linux shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgegossip.machine.quota import find_quota

V1_MOUNTS = """\
23 1 254:0 / / rw - ext4 /dev/root rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
33 31 0:30 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
"""
SPLIT_MOUNTS = """\
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
33 31 0:30 / /sys/fs/cgroup/cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpuacct
"""
V2_MOUNTS = "34 31 0:31 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(root: Path, group: str, limits: dict[str, str]) -> Path:
    files = {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": V2_MOUNTS}
    for path, limit in limits.items():
        files[f"sys/fs/cgroup{path}/cpu.max"] = limit + "\n"
        files[f"sys/fs/cgroup{path}/cpu.stat"] = "usage_usec 2500000\nuser_usec 1\n"
    return tree(root, files)


def test_there_is_no_quota_without_limits_or_without_linux(tmp_path: Path) -> None:
    assert find_quota(tmp_path) is None
    assert find_quota(v2(tmp_path, "/a", {"/a": "max 100000"})) is None


def test_a_quota_of_version_2_is_cores_and_what_was_used_of_them(tmp_path: Path) -> None:
    quota = find_quota(v2(tmp_path, "/a/b", {"/a/b": "50000 20000", "/a": "max 100000"}))
    assert quota is not None
    assert quota.cores == 2.5
    assert quota.used() == 2.5


def test_the_tightest_quota_binds_wherever_it_is(tmp_path: Path) -> None:
    quota = find_quota(v2(tmp_path, "/a/b", {"/a/b": "300000 100000", "/a": "80000 100000"}))
    assert quota is not None
    assert quota.cores == 0.8
    assert quota.usage == tmp_path / "sys/fs/cgroup/a/cpu.stat"


def test_a_quota_of_version_1_is_found_among_its_controllers(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct/jobs"
    files = {
        "proc/self/cgroup": "3:memory:/other\n1:cpu,cpuacct:/jobs\n0::/\n",
        "proc/self/mountinfo": V1_MOUNTS,
        f"{folder}/cpu.cfs_quota_us": "25000\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
        f"{folder}/cpuacct.usage": "1250000000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    }
    quota = find_quota(tree(tmp_path, files))
    assert quota is not None
    assert quota.cores == 0.25
    assert quota.used() == 1.25


@pytest.mark.parametrize(("accounted", "used"), [("/jobs", 1.5), ("/", None)])
def test_use_is_known_only_where_the_same_group_is_accounted(
    tmp_path: Path, accounted: str, used: float | None
) -> None:
    files = {
        "proc/self/cgroup": f"2:cpuacct:{accounted}\n1:cpu:/jobs\n",
        "proc/self/mountinfo": SPLIT_MOUNTS,
        "sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us": "25000\n",
        "sys/fs/cgroup/cpu/jobs/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpuacct/jobs/cpuacct.usage": "1500000000\n",
        "sys/fs/cgroup/cpuacct/cpuacct.usage": "9000000000\n",
    }
    quota = find_quota(tree(tmp_path, files))
    assert quota is not None
    assert quota.used() == used


def test_in_a_container_the_outer_path_leads_to_the_mounted_folder(tmp_path: Path) -> None:
    quota = find_quota(v2(tmp_path, "/docker/0123", {"": "150000 100000"}))
    assert quota is not None
    assert quota.cores == 1.5


def test_a_count_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    quota = find_quota(v2(tmp_path, "/", {"": "150000 100000"}))
    assert quota is not None
    assert quota.usage is not None
    quota.usage.write_text("nothing of use")
    assert quota.used() is None
    quota.usage.unlink()
    assert quota.used() is None
