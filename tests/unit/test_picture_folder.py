"""Folders of pictures."""

from __future__ import annotations

import struct
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image

from edgegossip.contract.errors import DataError, UsageError
from edgegossip.data import pictures as picture_folder
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.data.pictures import pictures


def draw(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw(tmp_path / "red" / "a.png", (200, 0, 0))
    draw(tmp_path / "red" / "deep" / "b.PNG", (100, 0, 0), size=(20, 10))
    draw(tmp_path / "blue" / "c.bmp", (0, 0, 50))
    (tmp_path / "blue" / "notes.txt").write_text("no picture")
    return tmp_path


def samples(data: Dataset) -> ArraySplit:
    assert isinstance(data.train, ArraySplit)
    return data.train


def test_a_folder_for_each_class_in_alphabetical_order(folder: Path) -> None:
    data = pictures(folder, size=4)
    assert (data.num_classes, data.input_shape, len(data.test)) == (2, (3, 4, 4), 0)
    x, y = samples(data).x, samples(data).y
    assert x.dtype == torch.uint8
    assert y.tolist() == [0, 1, 1]
    assert x[:, :, 0, 0].tolist() == [[0, 0, 50], [200, 0, 0], [100, 0, 0]]


def test_named_classes_keep_their_order_and_may_be_missing(folder: Path) -> None:
    data = pictures(folder, ("red", "green", "blue"), size=4)
    assert data.num_classes == 3
    assert sorted(samples(data).y.tolist()) == [0, 0, 2]


def test_gray_pictures_have_one_channel(folder: Path) -> None:
    assert samples(pictures(folder, size=5, num_channels=1)).x.shape == (3, 1, 5, 5)


def test_the_middle_of_a_wide_picture_is_kept(tmp_path: Path) -> None:
    wide = np.zeros((4, 12, 3), dtype=np.uint8)
    wide[:, 4:8] = 255
    (tmp_path / "white").mkdir()
    Image.fromarray(wide).save(tmp_path / "white" / "a.png")
    assert bool((samples(pictures(tmp_path, size=4)).x == 255).all())


def test_a_picture_is_turned_upright(tmp_path: Path) -> None:
    upper = np.zeros((4, 4, 3), dtype=np.uint8)
    upper[:2] = 255
    picture = Image.fromarray(upper)
    exif = picture.getexif()
    exif[0x0112] = 3  # upside down
    (tmp_path / "half").mkdir()
    picture.save(tmp_path / "half" / "a.png", exif=exif)
    x = samples(pictures(tmp_path, size=4)).x
    assert x[0, 0, :, 0].tolist() == [0, 0, 255, 255]


def test_what_cannot_be_read_is_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / "red" / "broken.jpg").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"broken\.jpg is not a readable picture") as raised:
        pictures(folder)
    assert "\n" not in str(raised.value)


def header_of_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", b"")
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("width", "height"), [(8_193, 8_192), (12_000, 12_000), (2**31 - 1, 2**31 - 1)]
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_that_is_too_large_is_refused_by_its_header(
    folder: Path, width: int, height: int
) -> None:
    (folder / "red" / "huge.png").write_bytes(header_of_png(width, height))
    with pytest.raises(
        DataError, match=r"huge\.png is too large .* at most 67,108,864"
    ) as raised:
        pictures(folder)
    assert str(width * height) in str(raised.value).replace(",", "")


def test_a_large_jpeg_is_read_at_a_smaller_scale(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(folder / "red" / "z.jpg", (0, 200, 0), size=(160, 80))
    exact = samples(pictures(folder, size=4)).x[-1]
    monkeypatch.setattr(picture_folder, "MAX_PIXELS", 2_000)
    torch.testing.assert_close(samples(pictures(folder, size=4)).x[-1], exact, rtol=0, atol=2)


def test_every_exception_of_a_decoder_names_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OverflowError("Python int too large to convert to C long")

    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(DataError, match=r"c\.bmp is not a readable picture \(OverflowError"):
        pictures(folder, num_channels=1)


def test_files_of_other_formats_are_no_pictures_whatever_their_names(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "red" / "script.png", "EPS")
    with pytest.raises(DataError, match=r"script\.png is not a readable picture"):
        pictures(folder)


def test_folders_that_do_not_fit_are_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no folder .*absent"):
        pictures(tmp_path / "absent")
    with pytest.raises(
        DataError, match="has a folder 'blue', which is none of the classes 'red'"
    ):
        pictures(folder, ("red",))
    empty = tmp_path / "empty"
    (empty / "red").mkdir(parents=True)
    with pytest.raises(DataError, match=r"empty has no pictures; expected files like red/NAME"):
        pictures(empty, ("red", "blue"))
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        pictures(folder, size=0)


def test_pillow_is_asked_for_where_it_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(UsageError, match=r"pip install 'edgegossip\[pictures\]'"):
        pictures(folder)
