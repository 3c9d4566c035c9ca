"""Readers of public file formats: what they read, and what they say of bad files."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.data_files import pixels, within

from edgegossip.contract.errors import DataError, UsageError
from edgegossip.data.dataset import Dataset, channel_statistics
from edgegossip.data.readers import (
    DATASETS,
    cifar10,
    digits,
    downsampled_imagenet,
    fashion_mnist,
    har,
    huggingface,
    mnist,
)


def labels(num_samples: int) -> NDArray[np.uint8]:
    return (np.arange(num_samples) % 10).astype(np.uint8)


def idx(array: NDArray[np.uint8]) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


@pytest.fixture
def mnist_dir(tmp_path: Path) -> Path:
    """A data folder with an MNIST of 20 training and 10 test pictures, packed in part."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, num_samples in (("train", 20), ("t10k", 10)):
        pictures = folder / f"{part}-images-idx3-ubyte.gz"
        pictures.write_bytes(gzip.compress(idx(pixels(num_samples, 28, 28))))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels(num_samples)))
    return tmp_path


@pytest.fixture
def cifar_dir(tmp_path: Path) -> Path:
    """A data folder with a CIFAR-10 of four pictures in each file."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        records = np.concatenate([labels(4)[:, None], pixels(4, 3072)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return tmp_path


@pytest.fixture
def imagenet_dir(tmp_path: Path) -> Path:
    """A data folder with an ImageNet 8x8 of two batches of five classes."""
    folder = tmp_path / "imagenet8x8"
    folder.mkdir()
    for name in ("train_data_batch_1", "train_data_batch_2", "val_data"):
        np.savez(folder / name, data=pixels(5, 192), labels=np.arange(1, 6))
    return tmp_path


def test_digits_are_1797_pictures_with_every_class_in_the_same_share() -> None:
    task = digits()
    assert (len(task.train), len(task.test)) == (1437, 360)
    x, y = task.train.batch(torch.arange(1437))
    assert (x.dtype, int(x.min()), int(x.max())) == (torch.uint8, 0, 255)
    shares = [split.labels.bincount() / len(split) for split in (task.train, task.test)]
    torch.testing.assert_close(*shares, rtol=0, atol=2 / 360)
    torch.testing.assert_close(task.prepare(x).std(), torch.tensor(1.0), rtol=1e-3, atol=0)
    assert y.dtype == torch.int64


def test_equal_seeds_split_the_digits_alike_and_others_do_not() -> None:
    first, again, other = (digits(seed).test.labels for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_mnist_is_read_from_plain_and_from_packed_files(mnist_dir: Path) -> None:
    task = mnist(mnist_dir)
    x, y = task.train.batch(torch.arange(20))
    packed = mnist_dir / "mnist" / "train-images-idx3-ubyte.gz"
    assert x.numpy().tobytes() == gzip.decompress(packed.read_bytes())[16:]
    assert y.tolist() == labels(20).tolist()
    assert (x.dtype, task.input_shape, len(task.test)) == (torch.uint8, (1, 28, 28), 10)


def test_fashion_mnist_has_the_same_layout_in_its_own_folder(mnist_dir: Path) -> None:
    (mnist_dir / "mnist").rename(mnist_dir / "fashion-mnist")
    assert fashion_mnist(mnist_dir).name == "fashion-mnist"


def test_missing_file_is_named_with_where_to_get_it_and_where_to_put_it(tmp_path: Path) -> None:
    message = (
        r"train-images-idx3-ubyte is missing.*get MNIST from http.*--data-dir or EDGEGOSSIP"
    )
    with pytest.raises(DataError, match=message):
        mnist(tmp_path)


def test_a_folder_a_step_too_deep_is_noticed(mnist_dir: Path) -> None:
    with pytest.raises(DataError) as complaint:
        mnist(mnist_dir / "mnist")
    assert "name the folder that holds mnist with --data-dir" in str(complaint.value)
    assert str(complaint.value).endswith(f"(did you mean {mnist_dir}?)")


def test_wrong_magic_is_refused_with_the_right_one(mnist_dir: Path) -> None:
    path = mnist_dir / "mnist" / "train-labels-idx1-ubyte"
    path.write_bytes(idx(pixels(20, 1, 1)))
    with pytest.raises(DataError, match=r"starts with '00000803', expected '00000801'"):
        mnist(mnist_dir)


@pytest.mark.parametrize(("num_bytes", "message"), [(5, "a header of 8"), (27, "has 19 bytes")])
def test_truncated_idx_file_is_refused_with_the_bytes_expected(
    mnist_dir: Path, num_bytes: int, message: str
) -> None:
    path = mnist_dir / "mnist" / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match=rf"train-labels-idx1-ubyte .*{message}"):
        mnist(mnist_dir)


def test_idx_file_with_bytes_too_many_is_refused(mnist_dir: Path) -> None:
    path = mnist_dir / "mnist" / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"has 21 bytes after its header, expected 20"):
        mnist(mnist_dir)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "plain"])
def test_bad_gzip_is_refused(mnist_dir: Path, damage: str) -> None:
    path = mnist_dir / "mnist" / "train-images-idx3-ubyte.gz"
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 0xFF
    damaged = {"truncated": content[:-9], "flipped": bytes(flipped), "plain": b"no gzip"}
    path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.*cannot be read"):
        mnist(mnist_dir)


def test_pictures_and_labels_of_different_number_are_refused(mnist_dir: Path) -> None:
    (mnist_dir / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(labels(9)))
    with pytest.raises(DataError, match=r"mnist, test split: labels have shape \[9\].*\[10\]"):
        mnist(mnist_dir)


def test_cifar10_keeps_planes_rows_and_the_order_of_the_files(cifar_dir: Path) -> None:
    task = cifar10(cifar_dir)
    x, y = task.train.batch(torch.arange(20))
    fourth = (cifar_dir / "cifar-10-batches-bin" / "data_batch_4.bin").read_bytes()
    assert x[12].numpy().tobytes() == fourth[1:3073]
    assert y.tolist() == 5 * [0, 1, 2, 3]
    assert (x.dtype, task.input_shape, len(task.test)) == (torch.uint8, (3, 32, 32), 4)


def test_missing_cifar10_file_is_named(cifar_dir: Path) -> None:
    (cifar_dir / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(
        DataError, match=r"data_batch_3\.bin cannot be read: No such file.*kriz"
    ):
        cifar10(cifar_dir)


@pytest.mark.parametrize("num_bytes", [0, 3072])
def test_truncated_cifar10_file_is_refused(cifar_dir: Path, num_bytes: int) -> None:
    path = cifar_dir / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DataError, match=rf"{num_bytes} bytes, expected a multiple of 3073"):
        cifar10(cifar_dir)


def test_imagenet_labels_start_at_zero(imagenet_dir: Path) -> None:
    task = downsampled_imagenet(imagenet_dir)
    assert task.train.labels.tolist() == 2 * [0, 1, 2, 3, 4]
    assert (task.num_classes, task.input_shape) == (5, (3, 8, 8))


def test_imagenet_batch_in_between_is_missed(imagenet_dir: Path) -> None:
    (imagenet_dir / "imagenet8x8" / "train_data_batch_1.npz").unlink()
    with pytest.raises(DataError, match=r"train_data_batch_1\.npz is missing; get ImageNet"):
        downsampled_imagenet(imagenet_dir)


def test_imagenet_of_another_size_is_refused(imagenet_dir: Path) -> None:
    (imagenet_dir / "imagenet8x8").rename(imagenet_dir / "imagenet16x16")
    with pytest.raises(DataError, match=r"data is uint8 \[5, 192\].*\[num_samples, 768\]"):
        downsampled_imagenet(imagenet_dir, size=16)


def test_missing_har_says_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"uci_har\.npz is missing; get UCI HAR from https"):
        har(tmp_path)


def test_hugging_face_without_its_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install edgegossip\[huggingface\]"):
        huggingface("ylecun/mnist")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of what `datasets` does we are not the judge
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3)])
def test_hugging_face_pictures_come_with_channels_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    picture = pixels(*shape)
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "pets" / part / label
            folder.mkdir(parents=True)
            image.fromarray(picture).save(folder / "0.png")
    task = huggingface(str(tmp_path / "pets"))
    x, y = task.train.batch(torch.arange(2))
    expected = picture[None] if picture.ndim == 2 else picture.transpose(2, 0, 1)
    assert np.array_equal(x[0].numpy(), expected)
    assert y.tolist() == [0, 1]
    with pytest.raises(DataError, match=r"cannot be loaded.*'validation'"):
        huggingface(str(tmp_path / "pets"), test_split="validation")


@pytest.mark.parametrize("version", [3, 4])
def test_a_data_set_of_hugging_face_may_bring_no_code(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    told: list[dict[str, Any]] = []
    table = {"image": [np.zeros((1, 2))] * 2, "label": [np.array(0), np.array(1)]}

    def load_3(name: str, configuration: str, trust_remote_code: bool | None = None) -> Any:  # noqa: ANN401
        told.append({"trust_remote_code": trust_remote_code})
        return {"train": table, "test": table}

    def load_4(name: str, configuration: str, **named: Any) -> Any:  # noqa: ANN401
        told.append(named)
        return {"train": table, "test": table}

    module = ModuleType("datasets")
    module.load_dataset = load_3 if version == 3 else load_4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert huggingface("somebody/something").num_classes == 2
    assert told == [{"trust_remote_code": False} if version == 3 else {}]


# Files that are made to do harm.


def bomb(header: bytes, num_bytes: int = 2**24) -> bytes:
    """A gzip of a thousandth of what comes out of it."""
    return gzip.compress(header + bytes(num_bytes))


def test_no_more_of_a_packed_file_is_unpacked_than_its_header_says(mnist_dir: Path) -> None:
    path = mnist_dir / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(bomb(idx(pixels(20, 28, 28))))
    with within(2**21), pytest.raises(DataError, match="has more than 15680 bytes after its"):
        mnist(mnist_dir)


def test_a_header_that_says_more_than_a_file_can_hold_is_refused_at_once(
    mnist_dir: Path,
) -> None:
    path = mnist_dir / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 3)) + b"\xff" * 12))
    with (
        within(2**20),
        pytest.raises(DataError, match=r"has at most .* bytes after its header"),
    ):
        mnist(mnist_dir)


def test_a_file_that_leaves_no_memory_to_work_with_is_refused(
    mnist_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(available=20_000)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(
        DataError, match="says that it holds 15,680 bytes, but half of the free"
    ):
        mnist(mnist_dir)


def test_a_cifar10_file_with_a_hole_in_it_is_not_read(
    cifar_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(cifar_dir / "cifar-10-batches-bin" / "data_batch_2.bin", 3073 * 2**30)
    with within(2**20), pytest.raises(DataError, match=r"data_batch_2\.bin says that it holds"):
        cifar10(cifar_dir)


def real(name: str) -> Dataset:
    """The real data set `name`, or a skipped test where its folder is not known."""
    data_dir = os.environ.get("EDGEGOSSIP_DATA")
    if data_dir is None:
        pytest.skip("EDGEGOSSIP_DATA does not name a folder of data sets")
    return DATASETS[name](Path(data_dir))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_train", "num_test", "num_classes"),
    [
        ("mnist", 60_000, 10_000, 10),
        ("cifar10", 50_000, 10_000, 10),
        ("imagenet8x8", 100_000, 10_000, 200),
        ("har", 7_352, 2_947, 6),
    ],
)
def test_real_files_hold_what_was_published(
    name: str, num_train: int, num_test: int, num_classes: int
) -> None:
    task = real(name)
    assert (len(task.train), len(task.test)) == (num_train, num_test)
    assert task.num_classes == num_classes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_published_mean_and_std_are_those_of_the_real_pictures(name: str) -> None:
    task = real(name)
    x, _ = task.train.batch(torch.arange(len(task.train)))
    assert task.mean is not None
    assert task.std is not None
    torch.testing.assert_close(channel_statistics(x), (task.mean, task.std), rtol=0, atol=1e-4)
