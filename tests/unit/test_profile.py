"""Profiles: read from files, refused with a reason."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from edgegossip.contract.errors import DataError
from edgegossip.machine.contention import Contention
from edgegossip.machine.profile import Profile

HEADER = "cores,network,disk,seconds"
ROWS = [f"0.{k},{k}e6,0,0.0{k + 1}" for k in range(9)] + ["1,0,5e7,0.25"]


def csv(folder: Path, rows: Iterable[str] = ROWS, header: str = HEADER) -> Path:
    path = folder / "profile.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_csv_file_is_read(tmp_path: Path) -> None:
    profile = Profile.read(csv(tmp_path))
    assert len(profile) == 10
    assert profile.contentions[1] == Contention(0.1, 1e6, 0.0)
    assert profile.contentions[-1] == Contention(1.0, 0.0, 5e7)
    assert profile.seconds[-1] == 0.25


def test_columns_may_stand_in_any_order_among_others(tmp_path: Path) -> None:
    rows = [f"job{k}, 0.0{k + 1}, 0, 2e6, 0.5" for k in range(10)]
    profile = Profile.read(csv(tmp_path, rows, "name, seconds, network, disk, cores"))
    assert profile.contentions[0] == Contention(0.5, 0.0, 2e6)
    assert profile.seconds[0] == 0.01


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = csv(tmp_path, header="cores,net,disk,time")
    with pytest.raises(DataError, match="no column 'network', 'seconds'; a profile has the"):
        Profile.read(path)
    path = csv(tmp_path, header="cores;network;disk;seconds")
    with pytest.raises(DataError, match=r"and this file 'cores;network;disk;seconds'$"):
        Profile.read(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0.5,0,0,nan", "row 11: seconds must be above 0 and finite, got nan"),
        ("0.5,0,0,0", "row 11: seconds must be above 0"),
        ("0.5,0,0,-1", "row 11: seconds must be above 0"),
        ("0.5,0,0,inf", "row 11: seconds must be above 0"),
        ("nan,0,0,1", r"row 11: cores must be in \[0, 1\]"),
        ("50,0,0,1", r"row 11: cores must be in \[0, 1\]"),
        ("0.5,-1,0,1", "row 11: cores .* others finite and >= 0"),
        ("0.5,0,0,fast", "row 11: 'fast' is not a number"),
        ("0.5,0", "row 11: None is not a number"),
    ],
)
def test_a_bad_row_is_refused_with_its_number(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Profile.read(csv(tmp_path, [*ROWS, row]))


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"profile.csv: a profile needs at least 10 rows, got 9"
    ):
        Profile.read(csv(tmp_path, ROWS[:9]))


def test_an_empty_or_binary_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    with pytest.raises(DataError, match="there is no profile"):
        Profile.read(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="no column 'cores', 'network', 'disk', 'seconds'"):
        Profile.read(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read the profile"):
        Profile.read(path)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("profile.parquet", "PROFILE.PARQUET"):
        with pytest.raises(DataError, match=r"needs pyarrow; save it as CSV, or pip install"):
            Profile.read(tmp_path / name)


def test_a_parquet_file_is_read_like_the_csv_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from_csv = Profile.read(csv(tmp_path))
    columns = {
        "cores": [u.cores for u in from_csv.contentions],
        "network": [u.network for u in from_csv.contentions],
        "disk": [u.disk for u in from_csv.contentions],
        "seconds": list(from_csv.seconds),
    }
    path = tmp_path / "profile.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    assert Profile.read(path) == from_csv
    parquet.write_table(pyarrow.table({"cores": columns["cores"]}), path)
    with pytest.raises(DataError, match="no column 'network', 'disk', 'seconds'"):
        Profile.read(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot read the profile"):
        Profile.read(path)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="one time a contention, got 1 contentions and 2"):
        Profile((Contention(),), (1.0, 2.0))
    with pytest.raises(ValueError, match="seconds must be above 0"):
        Profile((Contention(),) * 10, (0.0,) * 10)
