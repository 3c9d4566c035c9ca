"""The baselines and EdgeGossip on the sensor data of phones, one person per worker."""

from __future__ import annotations

from pathlib import Path

from edgegossip.contract.errors import DataError
from edgegossip.data.partition import BySubject
from edgegossip.data.readers import har
from edgegossip.models import sensor_cnn
from edgegossip.recipes.baselines import compare_baselines
from edgegossip.recipes.tasks import CommonSettings, Settings, default_data_dir
from edgegossip.runs.experiment import Comparison
from edgegossip.sim.link import Link
from edgegossip.sim.platform import Platform
from edgegossip.sim.traces import phones

HAR_CNN_SETTINGS = Settings(
    num_epochs=30, num_workers=21, throughput=500.0, batch_size=32, exchange_probability=0.1
)
PHONE_LINK = Link(latency=0.03, bandwidth=2.5e6)
"""A link of 20 Mbit/s and 30 ms, as in a mobile network."""


def har_cnn(
    settings: Settings = HAR_CNN_SETTINGS,
    *,
    data_dir: Path = default_data_dir(),
    phone_trace: Path | None = None,
) -> Comparison:
    """Activities of 21 people on 21 phones of measured speeds, tested on 9 other people.

    Each worker has one person's data. `compare` takes about half an hour on two cores.

    Args:
        settings: Settings of the recipe; `throughput` is that of the trace's fastest phone.
        data_dir: Folder with uci_har.npz; by default $EDGEGOSSIP_DATA.
        phone_trace: AI-Benchmark scores of phones (see `sim.traces.phones`); by default
            raw_ai_benchmark_list.json.gz in `data_dir`.
    """
    platforms = phone_platforms(settings, data_dir, phone_trace)
    return compare_baselines(
        har(data_dir),
        sensor_cnn,
        platforms,
        settings,
        partition=BySubject(),
        link=PHONE_LINK,
    )


def phone_platforms(
    settings: CommonSettings, data_dir: Path, phone_trace: Path | None
) -> tuple[Platform, ...]:
    """Make phones with the speeds of a trace; see `har_cnn`."""
    trace = phone_trace or data_dir / "raw_ai_benchmark_list.json.gz"
    try:
        return phones(trace, settings.num_workers, settings.throughput, settings.seed)
    except DataError as error:
        raise DataError(
            f"{error}; name it by --phone-trace, or its folder by --data-dir or EDGEGOSSIP_DATA"
        ) from error
