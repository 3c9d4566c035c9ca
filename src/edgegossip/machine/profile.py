"""Measurements of a profiling session: seconds per sample under each contention."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgegossip.contract.errors import DataError
from edgegossip.contract.ranges import check_range
from edgegossip.machine.contention import Contention
from edgegossip.machine.files import write_whole

COLUMNS = ("cores", "network", "disk", "seconds")
_MAX_BYTES = 2**26
_MAX_ROWS = 10**6
"""Maximum rows of a profile; a session yields several hundred."""
MIN_ROWS = 10
"""Minimum rows of a profile, which must determine a function of three variables."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Pairs of contention and seconds per sample, of one executor: the paper's {(U_i, t_i)}.

    Args:
        contentions: Use of the machine by other processes, at least 10 entries.
        seconds: Seconds per training sample under each contention, above 0.

    Raises:
        ValueError: If there are too few rows, or a number is out of range.
    """

    contentions: Sequence[Contention]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.contentions) != len(self.seconds):
            raise ValueError(
                f"a profile needs one time a contention, got {len(self.contentions)} "
                f"contentions and {len(self.seconds)} times"
            )
        if len(self.seconds) < MIN_ROWS:
            raise ValueError(
                f"a profile needs at least {MIN_ROWS} rows, got {len(self.seconds)}; measure "
                "training under more loads, and once under none"
            )
        for seconds in self.seconds:
            _require_time(seconds)

    def __len__(self) -> int:
        return len(self.seconds)

    @classmethod
    def read(cls, path: Path | str) -> Profile:
        """Read a CSV or Parquet file with the columns cores, network, disk and seconds.

        Units are those of `Contention`, and seconds per sample; other columns are ignored.
        Parquet files (suffix .parquet) need pyarrow: ``pip install 'edgegossip[parquet]'``.

        Raises:
            DataError: If the file is missing or has another format or a number out of range.
        """
        path = Path(path)
        is_parquet = path.suffix.lower() == ".parquet"
        columns = _read_parquet(path) if is_parquet else _read_csv(path)
        contentions, seconds = [], []
        rows = zip(*(columns[name] for name in COLUMNS), strict=True)
        for number, row in enumerate(rows, start=1):
            try:
                cores, network, disk, time = map(_number, row)
                contentions.append(Contention(cores, network, disk))
                seconds.append(_require_time(time))
            except ValueError as error:
                raise DataError(f"{path}, row {number}: {error}") from None
        try:
            return cls(tuple(contentions), tuple(seconds))
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None

    def write(self, path: Path | str) -> None:
        """Write a CSV file for `read`, atomically."""
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(COLUMNS)
        for u, seconds in zip(self.contentions, self.seconds, strict=True):
            writer.writerow((u.cores, u.network, u.disk, seconds))
        write_whole(Path(path), text.getvalue().encode())


def _require_time(seconds: float) -> float:
    check_range("seconds", seconds, "above 0 and finite")
    return seconds


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{value!r:.60} is not a number") from None


def _read_csv(path: Path) -> Mapping[str, Sequence[object]]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise csv.Error(f"more than {_MAX_BYTES:,} bytes")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            _require_columns(path, reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _unreadable(path, error) from None
    return {name: [row[name] for row in rows] for name in COLUMNS}


def _read_parquet(path: Path) -> Mapping[str, Sequence[object]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path} is a Parquet file, which needs pyarrow; save it as CSV, or "
            "pip install 'edgegossip[parquet]'"
        ) from None
    try:
        if pyarrow.parquet.read_metadata(path).num_rows > _MAX_ROWS:
            raise pyarrow.ArrowInvalid(f"more than {_MAX_ROWS:,} rows")
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from None
    _require_columns(path, table.column_names)
    return {name: table[name].to_pylist() for name in COLUMNS}


def _require_columns(path: Path, found: Sequence[str]) -> None:
    if missing := [name for name in COLUMNS if name not in found]:
        raise DataError(
            f"{path} has no column {', '.join(map(repr, missing))}; a profile has the columns "
            f"{', '.join(COLUMNS)}, and this file {', '.join(map(repr, found)) or 'none'}"
        )


def _unreadable(path: Path, error: Exception) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"there is no profile {path}")
    return DataError(f"cannot read the profile {path} ({error})")
