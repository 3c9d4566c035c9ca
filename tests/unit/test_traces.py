"""Platforms drawn from files of measurements, files that are not as they should be, jobs."""

from __future__ import annotations

import gzip
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from edgegossip.contract.errors import DataError
from edgegossip.machine.contention import Contention
from edgegossip.sim.traces import availability, batch_jobs, drift, gpus, phones

PHONES = [
    {"Model": "fast", "CPU_F_AI_Score": 200.0},
    {"Model": "middling", "CPU_F_AI_Score": "100"},
    {"Model": "slow", "CPU_F_AI_Score": 50},
]
JOB = "ResNet-18 (batch size 64)"
GPUS = {
    "v100": {
        f"('{JOB}', 1)": {"null": 10.0},
        f"('{JOB}', 4)": {"null": 35.0},
        "('LM (batch size 5)', 1)": {"null": 3.0},
    },
    "k80": {f"('{JOB}', 1)": {"null": 2.5}},
    "k80_unconsolidated": {f"('{JOB}', 1)": {"null": 99.0}},
}


def write(path: Path, content: object) -> Path:
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["phones.json", "phones.json.gz"])
def test_the_fastest_phone_has_the_throughput_and_others_their_share(
    tmp_path: Path, name: str
) -> None:
    drawn = phones(write(tmp_path / name, PHONES), num_workers=50, throughput=400.0)
    speeds = {platform.name: platform.throughput for platform in drawn}
    assert speeds == {"fast": 400.0, "middling": 200.0, "slow": 100.0}


def test_draws_repeat_and_follow_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "phones.json", PHONES)
    assert phones(path, 20, 1.0, seed=1) == phones(path, 20, 1.0, seed=1)
    assert phones(path, 20, 1.0, seed=1) != phones(path, 20, 1.0, seed=2)
    assert phones(path, 30, 1.0)[:20] == phones(path, 20, 1.0)


def test_a_gpu_takes_its_steps_times_the_batch(tmp_path: Path) -> None:
    drawn = gpus(write(tmp_path / "gpus.json", GPUS), num_workers=30)
    speeds = {platform.name: platform.throughput for platform in drawn}
    assert speeds == {"v100": 640.0, "k80": 160.0}


def test_paths_may_be_text(tmp_path: Path) -> None:
    phone_list = write(tmp_path / "phones.json.gz", PHONES)
    gpu_list = write(tmp_path / "gpus.json", GPUS)
    assert phones(str(phone_list), 5, 1.0) == phones(phone_list, 5, 1.0)
    assert gpus(str(gpu_list), 5) == gpus(gpu_list, 5)


def test_an_unknown_job_is_answered_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "gpus.json", GPUS)
    with pytest.raises(DataError, match=r"unknown job 'ResNet-18 \(batch size 65\)'.*mean"):
        gpus(path, 1, job="ResNet-18 (batch size 65)")


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        [{"Model": "a"}],
        [{"Model": "a", "CPU_F_AI_Score": None}],
        [{"Model": "a", "CPU_F_AI_Score": "fast"}],
        [{"Model": "a", "CPU_F_AI_Score": -1.0}],
        [{"Model": "a", "CPU_F_AI_Score": 0.0}],
        [1, 2],
        "text",
        3,
    ],
    ids=repr,
)
def test_a_file_that_is_no_list_of_phones_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(DataError, match="expected a list of"):
        phones(write(tmp_path / "phones.json", content), 4, 1.0)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"v100": {}},
        {"v100": []},
        {"v100": {"not python": {"null": 1.0}}},
        {"v100": {f"('{JOB}', 1)": {}}},
        {"v100": {f"('{JOB}', 1)": {"null": None}}},
        {"v100": {f"('{JOB}', 1)": {"null": 0.0}}},
        {"v100": {"3": {"null": 1.0}}},
    ],
    ids=repr,
)
def test_a_file_that_is_no_table_of_gpus_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(DataError):
        gpus(write(tmp_path / "gpus.json", content), 4)


def test_a_job_without_a_batch_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="job 'A3C'"):
        gpus(write(tmp_path / "gpus.json", GPUS), 1, job="A3C")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe\x00", gzip.compress(b"[]")[:-4]],
    ids=["empty", "torn", "no text", "cut short"],
)
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match="cannot read the trace"):
        phones(path, 4, 1.0)


def test_a_missing_file_is_named_with_what_should_be_in_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no trace .*/none\.json; expected a list"):
        phones(tmp_path / "none.json", 4, 1.0)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the trace"):
        phones(tmp_path, 4, 1.0)


# Jobs.


def test_jobs_change_the_load_about_once_a_phase() -> None:
    trace = batch_jobs(seed=0, phase=4.0, period=4000.0)
    assert len(trace.times) == pytest.approx(1000, rel=0.15)
    assert trace.times[-1] < trace.period == 4000.0


def test_jobs_use_cores_network_and_disk_and_pause() -> None:
    loads = batch_jobs(seed=0).contentions
    assert max(u.cores for u in loads) > 0.5
    assert max(u.network for u in loads) > 5e7
    assert max(u.disk for u in loads) > 1e8
    assert loads.count(Contention()) > 20


def test_jobs_are_those_of_their_seed() -> None:
    assert batch_jobs(seed=1) == batch_jobs(seed=1)
    assert batch_jobs(seed=1) != batch_jobs(seed=2)


def test_jobs_of_one_kind_are_of_this_kind() -> None:
    sorts, counts = (batch_jobs(job=job).contentions for job in ("sort", "word-count"))
    assert max(u.disk for u in sorts) > 1.5e8 > max(u.disk for u in counts)
    assert max(u.cores for u in sorts) < 0.45 < max(u.cores for u in counts)
    with pytest.raises(ValueError, match=r"unknown job 'srot'; .* mean 'sort'"):
        batch_jobs(job="srot")  # type: ignore[arg-type]


def test_heavier_jobs_use_more_and_never_more_than_all() -> None:
    light, heavy = batch_jobs(intensity=0.5), batch_jobs(intensity=2.0)
    assert all(
        a.cores <= b.cores for a, b in zip(light.contentions, heavy.contentions, strict=True)
    )
    assert max(u.cores for u in heavy.contentions) == 1.0


@pytest.mark.parametrize(
    "settings",
    [{"phase": 0.0}, {"phase": 9.0, "period": 5.0}, {"intensity": 0.0}, {"intensity": 3}],
)
def test_jobs_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="phase and period must be above 0"):
        batch_jobs(**settings)  # type: ignore[arg-type]


def test_a_speed_drifts_by_a_quarter_of_its_range_at_most() -> None:
    trace = drift(seed=2, most=4.0, step=5.0, period=4000.0)
    assert trace == drift(seed=2, most=4.0, step=5.0, period=4000.0)
    assert trace != drift(seed=3, most=4.0, step=5.0, period=4000.0)
    assert trace.times == tuple(5.0 * k for k in range(800))
    places = [math.log(each, 4.0) for each in trace.slow_downs]
    assert max(abs(b - a) for a, b in pairwise(places)) <= 0.25
    assert min(places) < 0.1
    assert max(places) > 0.9


@pytest.mark.parametrize("wrong", [{"most": 0.9}, {"step": 0.0}, {"step": 9.0, "period": 9.0}])
def test_a_drift_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match="most must be at least 1, and step and period above 0"
    ):
        drift(**wrong)  # type: ignore[arg-type]


# Spot machines.


def spot_file(folder: Path, **series: list[int]) -> Path:
    path = folder / "spot.json"
    named = {
        name: {"metadata": {"gap_seconds": 600}, "data": data} for name, data in series.items()
    }
    path.write_text(json.dumps(named))
    return path


def test_spot_machines_are_there_while_a_series_counts_them(tmp_path: Path) -> None:
    path = spot_file(tmp_path, a=[0, 2, 1, 0, 2, 2], b=[1, 1, 1, 0, 1, 1])
    first, second, third = availability(path, 3, 6.0, hours=1.0)
    assert first == ((1.0, 3.0), (4.0, math.inf))
    assert second == ((1.0, 2.0), (4.0, math.inf))
    assert third == ((0.0, 3.0), (4.0, math.inf))
    only = availability(path, 3, 6.0, hours=1.0, series="b")
    assert only == (third, third, third)  # one machine, three times


def test_seeds_choose_the_part_of_a_spot_trace(tmp_path: Path) -> None:
    path = spot_file(tmp_path, a=[k % 7 % 2 for k in range(400)])
    parts = {availability(path, 1, 60.0, hours=2.0, seed=seed) for seed in range(8)}
    assert len(parts) > 1
    for spans in parts:
        assert all(0 <= begin < 60 for begin, _ in spans[0])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("[]", "expected"),
        ('{"a": {"data": [1]}}', "gap_seconds"),
        ('{"a": {"metadata": {"gap_seconds": 600}, "data": [1]}}', "no series of 1 hours"),
    ],
)
def test_a_file_that_is_no_spot_trace_is_refused(
    content: str, match: str, tmp_path: Path
) -> None:
    path = tmp_path / "spot.json"
    path.write_text(content)
    with pytest.raises(DataError, match=match):
        availability(path, 2, 10.0, hours=1.0)
