"""Arrays of one's own in an `.npz` file: what is read, and which files are refused."""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray
from tests.data_files import DRAWS, pixels, within

from edgegossip.contract.errors import DataError
from edgegossip.data.readers import npz, read_npz


def own_arrays() -> dict[str, Any]:
    return {
        "x_train": DRAWS.normal(3, 2, (6, 2, 4)),
        "y_train": np.array([0, 1, 2, 0, 1, 2], np.uint8),
        "x_test": DRAWS.normal(3, 2, (3, 2, 4)),
        "y_test": np.array([0, 1, 2]),
        "subject_train": np.array([1, 1, 1, 4, 4, 4], np.uint8),
    }


def test_own_arrays_are_read_with_their_subjects_and_standardized(tmp_path: Path) -> None:
    arrays = own_arrays()
    np.savez(tmp_path / "mine.npz", **arrays)
    task = npz(tmp_path / "mine.npz")
    x, y = task.train.batch(torch.arange(6))
    assert (task.name, task.num_classes, task.input_shape) == ("mine", 3, (2, 4))
    assert (x.dtype, y.tolist()) == (torch.float32, [0, 1, 2, 0, 1, 2])
    assert task.subjects is not None
    assert task.subjects.tolist() == [1, 1, 1, 4, 4, 4]
    means = task.prepare(x).mean((0, 2))
    torch.testing.assert_close(means, torch.zeros(2), rtol=0, atol=1e-6)


def test_gray_pictures_of_an_npz_get_one_channel(tmp_path: Path) -> None:
    arrays = own_arrays() | {"x_train": pixels(6, 5, 5), "x_test": pixels(3, 5, 5)}
    np.savez(tmp_path / "gray.npz", **arrays)
    assert npz(tmp_path / "gray.npz").input_shape == (1, 5, 5)


def test_npz_without_a_key_is_refused_with_the_keys_it_has(tmp_path: Path) -> None:
    arrays = own_arrays()
    del arrays["y_test"]
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=r"mine\.npz lacks \['y_test'\]; it holds \['subject"):
        npz(tmp_path / "mine.npz")


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        ("y_test", np.array([0.5, 1, 2]), "mine.npz, test: labels are float64, expected whole"),
        ("subject_train", np.zeros(6), "mine.npz: subject_train are float64, expected whole"),
        ("x_test", np.array(["a", "b", "c"]), r"test: samples are <U1 \[3\], expected numbers"),
        ("x_train", np.zeros(6), r"train: samples are float64 \[6\], expected numbers"),
        ("x_train", np.zeros((0, 2, 4)), "mine, train split: no samples"),
        ("x_train", np.full((6, 2, 4), np.nan), r"sample 0 has nan at \[0, 0\]"),
        ("x_test", np.full((3, 2, 4), 1e300), r"sample 0 has inf at \[0, 0\]"),
    ],
)
def test_npz_with_an_unfit_array_is_refused(
    tmp_path: Path, key: str, array: NDArray[Any], message: str
) -> None:
    arrays = own_arrays() | {key: array}
    if len(array) == 0:
        arrays["y_train"] = np.zeros(0, np.int64)
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=message):
        npz(tmp_path / "mine.npz")


@pytest.mark.parametrize(
    "content",
    [
        b"no array",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, "
        b"'shape': (100000000000000, 300), }".ljust(128)
        + b"\n",
    ],
    ids=["text", "immense"],
)
def test_npz_with_something_that_is_no_array_is_refused(tmp_path: Path, content: bytes) -> None:
    np.savez(tmp_path / "mine.npz", **{k: a for k, a in own_arrays().items() if k != "x_train"})
    with zipfile.ZipFile(tmp_path / "mine.npz", "a") as archive:
        archive.writestr("x_train.npy", content)
    with pytest.raises(DataError, match="is damaged or holds pickled objects"):
        npz(tmp_path / "mine.npz")


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        (
            "y_train",
            np.array([0, 1, 10**11, 0, 1, 2]),
            r"label is 100000000000, expected 0 \.\. 999",
        ),
        ("x_train", np.zeros((6, 0, 4)), r"samples are float64 \[6, 0, 4\]"),
    ],
)
def test_classes_and_shapes_that_no_model_can_have_are_refused(
    tmp_path: Path, key: str, array: NDArray[Any], message: str
) -> None:
    np.savez(tmp_path / "mine.npz", **own_arrays() | {key: array})
    with pytest.raises(DataError, match=message):
        npz(tmp_path / "mine.npz")


class Intruder:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('a pickle was loaded')",)


@pytest.mark.parametrize("layout", ["archive", "bare"])
def test_pickled_objects_are_refused_and_never_loaded(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "mine.npz"
    if layout == "archive":
        np.savez(path, **own_arrays() | {"x_train": np.array([Intruder()] * 6)})
    else:
        path.write_bytes(pickle.dumps(Intruder()))
    with pytest.raises(DataError, match=r"mine\.npz is damaged or holds pickled objects"):
        npz(path)


def test_a_bare_array_is_no_archive(tmp_path: Path) -> None:
    with (tmp_path / "mine.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match=r"is not an \.npz archive; write it with numpy\.savez"):
        npz(tmp_path / "mine.npz")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_npz_is_read_unchanged_or_refused(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, y_train=np.arange(5))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1), label="position")
    if data.draw(st.booleans(), label="truncate"):
        del content[position:]
    else:
        content[position] ^= data.draw(st.integers(1, 255), label="flip")
    path.write_bytes(content)
    with contextlib.suppress(DataError):
        assert read_npz(path, ("y_train",))["y_train"].tolist() == [0, 1, 2, 3, 4]


def test_an_archive_whose_arrays_would_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(
        tmp_path / "mine.npz", **own_arrays() | {"x_train": np.zeros((6, 2**16))}
    )
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**22))
    with within(2**20), pytest.raises(DataError, match=r"mine\.npz says that it holds 3,"):
        npz(tmp_path / "mine.npz")
