"""Files that may come from somebody else: whole ones, and how the package reads each."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from numpy.typing import NDArray
from PIL import Image
from tests.run_folders import comparison
from tests.small_runs import NUM_WORKERS, ctrl_c_at, quick, small_run
from tests.small_tasks import experiment, regression
from tests.unit.test_study_report import figure, map_panel, panel, write_study

from edgegossip.contract.errors import Interrupted
from edgegossip.data import readers
from edgegossip.data.dataset import Dataset
from edgegossip.data.pictures import pictures
from edgegossip.machine.contention import Contention
from edgegossip.machine.profile import Profile
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real import record
from edgegossip.real.gathering import WORKERS, Gathering
from edgegossip.real.worker import WorkerSettings, take_part
from edgegossip.real.worker_files import snapshot_path
from edgegossip.real.worker_folder import goes_on_at, has_ended
from edgegossip.report.folder import read_folder
from edgegossip.report.page import write_report
from edgegossip.report.study_page import write_study_report
from edgegossip.runs.describe import header
from edgegossip.runs.events import to_line
from edgegossip.runs.files import save_checkpoint, write_json
from edgegossip.runs.folder import load_results
from edgegossip.runs.runner import run
from edgegossip.sim.traces import gpus, phones

QUICK = quick()
EPOCHS = small_run("epoch-gossip", evaluation_interval=None)
REGRESSION = experiment(regression(), num_rounds=3)
DRAWS = np.random.default_rng(0)


@dataclass(frozen=True)
class Target:
    """Something that the package reads.

    Args:
        make: Writes whole files into an empty folder.
        read: Reads that folder; may write to it.
        files: Patterns of the files in it that are damaged.
        share: How often it is chosen, against others.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    files: tuple[str, ...] = ("**/*",)
    share: float = 1.0


def pixels(*shape: int) -> NDArray[np.uint8]:
    return DRAWS.integers(0, 256, shape, dtype=np.uint8)


def idx(array: NDArray[np.uint8]) -> bytes:
    shape = np.array(array.shape, ">u4").tobytes()
    return bytes((0, 0, 8, array.ndim)) + shape + array.tobytes()


def make_mnist(folder: Path) -> None:
    (folder / "fashion-mnist").mkdir()
    for part, number in (("train", 20), ("t10k", 10)):
        labels = (np.arange(number) % 10).astype(np.uint8)
        path = folder / "fashion-mnist" / f"{part}-images-idx3-ubyte.gz"
        path.write_bytes(gzip.compress(idx(pixels(number, 9, 9))))
        (path.parent / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))


def make_cifar10(folder: Path) -> None:
    (folder / "cifar-10-batches-bin").mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        path = folder / "cifar-10-batches-bin" / f"{name}.bin"
        path.write_bytes(b"".join(bytes([each]) + pixels(3072).tobytes() for each in range(3)))


def make_har(folder: Path) -> None:
    y = np.arange(12) % 6
    x = DRAWS.normal(size=(12, 9, 16)).astype(np.float32)
    named = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez_compressed(folder / "uci_har.npz", **named, subject_train=np.arange(12) % 3)  # type: ignore[arg-type]


def make_imagenet(folder: Path) -> None:
    (folder / "imagenet8x8").mkdir()
    for name in ("train_data_batch_1", "train_data_batch_2", "val_data"):
        np.savez(
            folder / "imagenet8x8" / f"{name}.npz",
            data=pixels(5, 192),
            labels=np.arange(1, 6),
        )


def make_traces(folder: Path) -> None:
    job = "ResNet-18 (batch size 64)"
    speeds = {f"('{job}', 1)": {"null": 10.0}, f"('{job}', 4)": {"null": 35.0}}
    scores = [{"Model": f"phone {score}", "CPU_F_AI_Score": score} for score in (50, 200.0)]
    (folder / "gpus.json").write_text(json.dumps({"v100": speeds, "k80": speeds}))
    (folder / "phones.json.gz").write_bytes(gzip.compress(json.dumps(scores).encode()))


def read_traces(folder: Path) -> None:
    gpus(folder / "gpus.json", num_workers=3)
    phones(folder / "phones.json.gz", num_workers=3, throughput=100.0)


def make_pictures(folder: Path) -> None:
    """Pictures of all formats that are read, and of several modes."""
    (folder / "class").mkdir()
    color = Image.fromarray(pixels(9, 12, 3))
    exif = color.getexif()
    exif[0x0112] = 6  # lies on its side
    for suffix in ("bmp", "gif", "jpg", "png", "ppm", "tif", "webp"):
        color.save(folder / "class" / f"plain.{suffix}")
    for suffix in ("jpg", "png", "tif", "webp"):
        color.save(folder / "class" / f"turned.{suffix}", exif=exif)
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        color.save(folder / "class" / f"{compression}.tif", compression=compression)
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        color.convert(mode).save(folder / "class" / f"{mode[:2].strip(';')}.png")
    color.convert("CMYK").save(folder / "class" / "cmyk.jpg")


def make_profile(folder: Path) -> None:
    loads = [Contention(cores=n / 12, network=1e6 * n, disk=1e5 * n) for n in range(12)]
    Profile(loads, [0.01 * (1 + n) for n in range(12)]).write(folder / "profile.csv")


def make_stopped(folder: Path) -> None:
    """A run that was interrupted, with its checkpoint."""
    try:
        with ctrl_c_at(9, QUICK.algorithm):
            run(QUICK, out=folder, num_threads=0)
    except Interrupted:
        return


def make_stopped_regression(folder: Path) -> None:
    try:
        with ctrl_c_at(20, REGRESSION.algorithm):
            run(REGRESSION, out=folder, num_threads=0)
    except Interrupted:
        return


def make_finished(folder: Path) -> None:
    run(QUICK, out=folder, num_threads=0)


def make_workers(folder: Path) -> None:
    """Folders of workers that have come to their ends, and snapshots that nobody measured."""
    params = EPOCHS.workload().initial_params()
    described = header(EPOCHS, None)
    end = {"reason": "finished", "seconds": 2.0, "wall_seconds": 3.0, "mean_staleness": 0.0}
    for rank in range(NUM_WORKERS):
        own = folder / WORKERS / str(rank)
        (own / "snapshots").mkdir(parents=True)
        write_json(own / "experiment.json", described)
        write_json(own / "summary.json", {"rank": rank, **end})
        who = {"rank": rank, "start": 0.25}
        lines = [
            {"type": "worker", "incarnation": 0},
            {"type": "trained", "time": 0.5, "num_samples": 8, "cost": 8, "loss": 1.0, **who},
            {"type": "sent", "time": 0.5, "round": 0, "num_bytes": 99, "end": 0.6, **who},
            {"type": "recovered", "time": 0.9, **who},
            {"type": "ended", "time": 2.0},
        ]
        (own / "events.jsonl").write_bytes(b"".join(map(to_line, lines)))
        safetensors.torch.save_file({"params": params}, own / "params.safetensors")
        safetensors.torch.save_file(
            {"params": params}, snapshot_path(own / "snapshots", rank % 2)
        )
        save_checkpoint(own / "checkpoint.safetensors", {"now": 1.0, "incarnation": 0})
    write_json(folder / WORKERS / "evaluations.json", {"0": dict.fromkeys(EVALUATED, 0.5)})


EVALUATED = (
    "time",
    "epochs",
    "accuracy",
    "loss",
    "consensus_distance",
    "bytes_sent",
    "samples_processed",
    "joules",
    "busy_joules",
    "idle_joules",
    "link_joules",
    "goodput",
    "compute_used",
    "node_seconds",
)


def read_workers(folder: Path) -> None:
    """The steps of `launch --resume` other than starting processes, and `gather`."""
    gathering = Gathering(EPOCHS, folder)
    described = header(EPOCHS, None)
    ended = [each.rank for each in gathering.workers if has_ended(each.path, described)]
    assert len(ended) <= NUM_WORKERS
    gathering.go_on_at(max(goes_on_at(each.path) for each in gathering.workers))
    gathering.finish()


ALONE = WorkerSettings(
    meet_seconds=0.01, min_workers=1, max_seconds=0.2, checkpoint_seconds=0.001
)


def be_worker(folder: Path) -> None:
    """Take part without the others, or go on."""
    take_part(EPOCHS, 0, MemoryNetwork().transport(0), out=folder, settings=ALONE)


def make_worker(folder: Path) -> None:
    """A worker that was killed."""
    kept: list[bytes] = []
    path = folder / "checkpoint.safetensors"

    def save_and_keep(to: Path, tree: object) -> None:
        save_checkpoint(to, tree)
        kept.append(to.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "save_checkpoint", save_and_keep)
        be_worker(folder)
    path.write_bytes(kept[-1])
    (folder / "summary.json").unlink()


def make_study(folder: Path) -> None:
    panels = [panel("lines"), panel("bars"), panel("stacked"), map_panel()]
    write_study(folder, figures=[figure("bars") | {"panels": panels}])


def use(dataset: Dataset) -> None:
    """Take what training takes first."""
    x, y = dataset.train.batch(torch.arange(min(4, len(dataset.train))))
    assert bool(dataset.prepare(x).isfinite().all())
    assert 0 <= int(y.min()) <= int(y.max()) < dataset.num_classes
    assert math.prod(dataset.input_shape) > 0


TARGETS = {
    "fashion-mnist": Target(make_mnist, lambda out: use(readers.fashion_mnist(out)), share=3),
    "cifar10": Target(make_cifar10, lambda out: use(readers.cifar10(out))),
    "har": Target(make_har, lambda out: use(readers.har(out)), share=3),
    "imagenet8x8": Target(make_imagenet, lambda out: use(readers.downsampled_imagenet(out))),
    "traces": Target(make_traces, read_traces),
    "pictures": Target(make_pictures, lambda out: use(pictures(out, size=4)), share=3),
    "profile": Target(make_profile, lambda out: Profile.read(out / "profile.csv")),
    "resumed run": Target(
        make_stopped,
        lambda out: run(QUICK, out=out, resume=True, num_threads=0),
        ("checkpoint.safetensors", "experiment.json", "events.jsonl"),
    ),
    "finished run": Target(make_finished, load_results),
    "resumed regression": Target(
        make_stopped_regression,
        lambda out: run(REGRESSION, out=out, resume=True, num_threads=0),
        ("checkpoint.safetensors", "experiment.json", "events.jsonl"),
    ),
    "report of a regression": Target(
        lambda out: run(REGRESSION, out=out, num_threads=0), read_folder
    ),
    "workers": Target(make_workers, read_workers, share=2),
    "resumed worker": Target(
        make_worker, be_worker, ("checkpoint.safetensors", "events.jsonl"), share=0.1
    ),
    "comparison": Target(comparison, read_folder, share=2),
    "report": Target(comparison, write_report, share=0.03),
    "study": Target(make_study, write_study_report, share=0.03),
}
