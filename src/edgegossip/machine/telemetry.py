"""Stores for monitors' means: memory, a file of lines, or Redis."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgegossip.contract.errors import EdgeGossipError, NetworkError, without_password
from edgegossip.contract.protocol import Rank, Seconds

if TYPE_CHECKING:
    from redis import Redis

MAX_SAMPLES = 7 * 24 * 60
"""Samples that memory and Redis keep for each worker: one week."""
PASSWORD = "EDGEGOSSIP_REDIS_PASSWORD"
"""Name of the environment variable that may hold the password of Redis."""
_MAX_UNSTORED = 24 * 60
"""Number of samples that are kept for a failed store: one day."""
_PATIENCE: Seconds = 1.0
"""Timeout for each answer from Redis."""

_log = logging.getLogger("edgegossip.machine")


@dataclass(frozen=True, slots=True)
class Sample:
    """Means over about a minute.

    Attributes:
        at: End of the interval, in seconds since 1970.
        seconds: Length of the interval.
        cores: Share of the cores that other processes used, in [0, 1].
        network: Bytes per second that other processes exchanged.
        disk: Bytes per second that other processes read and wrote.
        throughput: Work per second, in training samples.
    """

    at: float
    seconds: Seconds
    cores: float
    network: float
    disk: float
    throughput: float

    def to_json(self) -> str:
        """Write the sample as one line of JSON."""
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes) -> Sample:
        """Read a line that `to_json` has written.

        Raises:
            ValueError: If `text` is anything else.
        """
        try:
            values = {name: float(value) for name, value in json.loads(text).items()}
            return Sample(**values)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{text!r:.80} is not a sample of telemetry ({error})") from None


class TelemetryStore(Protocol):
    """Keeps samples by rank; used by one thread at a time."""

    def append(self, rank: Rank, sample: Sample) -> None:
        """Keep `sample`.

        Raises:
            OSError: If the store cannot be written at present.
            NetworkError: If the store cannot be reached at present.
        """

    def read(self, rank: Rank) -> list[Sample]:
        """Return the samples of `rank`, oldest first.

        Raises:
            OSError: If the store cannot be read at present.
            NetworkError: If the store cannot be reached at present.
        """

    def close(self) -> None:
        """Close files and connections."""


class Journal:
    """Stores one worker's samples and never raises.

    Samples that the store rejects are retried with the next sample, for up to a day; then the
    oldest are dropped. A failure is logged once until the store works again.

    Args:
        store: Store for the samples.
        rank: Rank of the worker.
    """

    def __init__(self, store: TelemetryStore, rank: Rank) -> None:
        self._store = store
        self._rank = rank
        self._unstored: deque[Sample] = deque(maxlen=_MAX_UNSTORED)
        self._is_failing = False

    def append(self, sample: Sample) -> None:
        """Store `sample` and earlier samples that failed."""
        self._unstored.append(sample)
        try:
            while self._unstored:
                self._store.append(self._rank, self._unstored[0])
                self._unstored.popleft()
        except (OSError, EdgeGossipError) as error:
            if not self._is_failing:
                _log.warning("telemetry is not stored, but training continues: %s", error)
            self._is_failing = True
            return
        if self._is_failing:
            _log.info("telemetry is stored again")
        self._is_failing = False


class MemoryTelemetry:
    """Keeps a week of samples in memory.

    >>> store = MemoryTelemetry()
    >>> store.append(0, Sample(60.0, 60.0, cores=0.5, network=0.0, disk=0.0, throughput=90.0))
    >>> [sample.cores for sample in store.read(0)]
    [0.5]
    """

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self._max_samples = max_samples
        self._samples: dict[Rank, deque[Sample]] = {}

    def append(self, rank: Rank, sample: Sample) -> None:
        self._samples.setdefault(rank, deque(maxlen=self._max_samples)).append(sample)

    def read(self, rank: Rank) -> list[Sample]:
        return list(self._samples.get(rank, ()))

    def close(self) -> None:
        pass


class JsonLinesTelemetry:
    """Appends a line per sample to a file, which several workers may share.

    Each line is written by one system call, so lines of different processes never mix. Lines
    that a full disk or a power cut has truncated are skipped.

    Args:
        path: File, made if missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_torn = False  # whether the file ends within a line
        with suppress(OSError), path.open("rb") as file:  # not there, or empty
            file.seek(-1, os.SEEK_END)
            self._is_torn = file.read(1) != b"\n"

    def append(self, rank: Rank, sample: Sample) -> None:
        line = json.dumps({"rank": rank} | asdict(sample), allow_nan=False).encode() + b"\n"
        if self._is_torn:
            line = b"\n" + line
        self._is_torn = True
        # Opened each time, so that it may be moved away meanwhile, as logrotate does.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            num_written = os.write(file, line)
        finally:
            os.close(file)
        if num_written < len(line):
            raise OSError(f"only part of a line was written to {self._path}; is the disk full?")
        self._is_torn = False

    def read(self, rank: Rank) -> list[Sample]:
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        samples = []
        for line in lines:
            try:
                entry = json.loads(line)
                if entry.pop("rank") == rank:
                    samples.append(Sample(**entry))
            except (ValueError, TypeError, AttributeError, KeyError):
                continue
        return samples

    def close(self) -> None:
        pass


class RedisTelemetry:
    """Keeps a week of samples in Redis, as the paper's monitor does.

    The samples of a rank form a set that is sorted by time. Storing a sample again changes
    nothing, so a lost answer causes no duplicates.

    Args:
        url: ``redis://[[user]:password@]host:port/db``, or ``rediss://`` with TLS. Without a
            password in the URL, the environment variable EDGEGOSSIP_REDIS_PASSWORD may provide
            one: other users of a machine can see the command line, but not the environment.
        run: Name that keeps runs on one server apart.
        max_samples: Number of samples to keep for each rank.

    Raises:
        NetworkError: If the package redis is missing, or the URL is malformed.
    """

    def __init__(self, url: str, run: str, max_samples: int = MAX_SAMPLES) -> None:
        self._redis, self._error = _connect(url)
        self._server = without_password(url)
        self._run = run
        self._max_samples = max_samples

    def append(self, rank: Rank, sample: Sample) -> None:
        key = self._key(rank)
        try:
            pipe = self._redis.pipeline()
            pipe.zadd(key, {sample.to_json(): sample.at})
            pipe.zremrangebyrank(key, 0, -1 - self._max_samples)
            pipe.execute()
        except self._error as error:
            raise self._unreachable(error) from None

    def read(self, rank: Rank) -> list[Sample]:
        try:
            lines: Any = self._redis.zrange(self._key(rank), 0, -1)
            return [Sample.from_json(line) for line in lines]
        except (self._error, ValueError) as error:
            raise self._unreachable(error) from None

    def close(self) -> None:
        self._redis.close()

    def _key(self, rank: Rank) -> str:
        return f"edgegossip:{self._run}:telemetry:{rank}"

    def _unreachable(self, error: Exception) -> NetworkError:
        return NetworkError(f"Redis at {self._server} failed ({error})")


def _connect(url: str) -> tuple[Redis, type[Exception]]:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        raise NetworkError(
            "telemetry in Redis needs the package redis; pip install 'edgegossip[redis]'"
        ) from None
    try:
        client = redis.Redis.from_url(
            url,
            password=os.environ.get(PASSWORD),  # one in the URL goes first
            socket_timeout=_PATIENCE,
            socket_connect_timeout=_PATIENCE,
            retry=Retry(NoBackoff(), 0),  # the journal tries again, a minute later
        )
    except ValueError as error:
        raise NetworkError(
            "the address of Redis must look like redis://host:6379/0, not "
            f"{without_password(url)} ({error})"
        ) from None
    return client, redis.RedisError


def open_telemetry(where: str, run: str) -> TelemetryStore:
    """Open a store from its description.

    Args:
        where: "memory", a Redis URL (``redis://host:6379/0``), or the path of a file.
        run: Name that keeps runs on one Redis server apart.

    Raises:
        NetworkError: If the package redis is missing, or the URL is malformed.
    """
    if where == "memory":
        return MemoryTelemetry()
    if where.startswith(("redis://", "rediss://", "unix://")):
        return RedisTelemetry(where, run)
    return JsonLinesTelemetry(Path(where))
