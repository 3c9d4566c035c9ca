"""Folders of pictures, and random changes to training pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from edgegossip.contract.errors import DataError, require_extra
from edgegossip.contract.ranges import check_range
from edgegossip.data.dataset import NO_SAMPLES, ArraySplit, Dataset


def flip_and_crop(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Mirror each picture with probability 1/2 and shift it by up to `padding` pixels each way.

    The usual augmentation of CIFAR-10: a random crop out of the picture with a border of zeros.
    On raw uint8 pictures, the border is black, as in torchvision; on standardized pictures, it
    has the mean color.

    Args:
        x: Pictures [batch, channels, height, width], float or uint8; not changed.
        generator: Source of the random flips and shifts.
        padding: Width of the border in pixels, at least 0.

    Raises:
        ValueError: If `padding` is negative, or `x` is not four-dimensional.

    References:
        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.

    >>> pictures = torch.arange(3).view(1, 1, 1, 3)
    >>> flip_and_crop(pictures, torch.Generator().manual_seed(0), padding=0)
    tensor([[[[2, 1, 0]]]])
    """
    check_range("padding", padding, "at least 0")
    if x.ndim != 4:
        raise ValueError(
            f"pictures must be [batch, channels, height, width], got {list(x.shape)}; other "
            "samples need an augmentation of their own, or None"
        )
    num_pictures, num_channels, height, width = x.shape
    top, left = torch.randint(2 * padding + 1, (2, num_pictures, 1), generator=generator)
    is_mirrored = torch.randint(2, (num_pictures, 1), generator=generator).bool()
    rows = top + torch.arange(height)  # [num_pictures, height]
    columns = torch.arange(width)
    columns = left + torch.where(is_mirrored, columns.flip(0), columns)  # [num_pictures, width]
    # One gather for the whole batch: twice as fast as indexing, a loop or a view of windows.
    padded = F.pad(x, (padding, padding, padding, padding)).flatten(2)
    pixels = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]
    pixels = pixels.view(num_pictures, 1, -1).expand(-1, num_channels, -1)
    return padded.gather(2, pixels).view_as(x)


SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
MAX_PIXELS = 2**26
"""Pixels of the largest picture that is read; a JPEG with more is decoded on a smaller scale,
if that makes it small enough."""
_MODES = {1: "L", 3: "RGB"}
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # Pillow knows riskier ones


def pictures(
    folder: Path | str,
    classes: Sequence[str] = (),
    *,
    size: int = 32,
    num_channels: Literal[1, 3] = 3,
) -> Dataset:
    """Read a folder of pictures, with a subfolder for each class, into memory.

    Each picture is cropped to its central square and scaled. A subfolder may be missing, or may
    contain folders. Files without a picture suffix are skipped. Pictures are read one by one;
    each takes up to 8 bytes for each of its pixels, at most half a gigabyte.

    Args:
        folder: The folder.
        classes: Names of the subfolders, in the order of the labels; by default all, in
            alphabetical order. Workers with their own folders (`Local`) must name the classes,
            because a folder may lack a class.
        size: Pixels per side, at least 1.
        num_channels: 3 for color, 1 for grayscale.

    Returns:
        A data set without a test split: uint8 [num_samples, num_channels, size, size].

    Raises:
        DataError: If there is no folder or no picture, a subfolder belongs to no class, or a
            picture cannot be read or is too large.
        UsageError: If Pillow is missing.
        ValueError: If `size` or `num_channels` is out of range.
    """
    require_extra("eg.pictures", "PIL", "pictures")
    check_range("size", size, "at least 1")
    if num_channels not in _MODES:
        raise ValueError(f"num_channels must be 1 or 3, got {num_channels}")
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(
            f"there is no folder {folder}; expected one with a folder of each class"
        )
    found = sorted(each.name for each in folder.iterdir() if each.is_dir())
    names = tuple(classes) or tuple(found)
    if unknown := sorted(set(found) - set(names)):
        raise DataError(
            f"{folder} has a folder {unknown[0]!r}, which is none of the classes "
            f"{', '.join(map(repr, names))}; move it elsewhere, or add it to the classes"
        )
    paths = [
        (path, y)
        for y, name in enumerate(names)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not paths:
        raise DataError(
            f"{folder} has no pictures; expected files like {names[0] if names else 'CLASS'}"
            "/NAME.jpg"
        )
    x = torch.stack([_read(path, size, _MODES[num_channels]) for path, _ in paths])
    labels = torch.tensor([y for _, y in paths])
    split = ArraySplit(x.view(-1, num_channels, size, size), labels)
    return Dataset(folder.name, split, NO_SAMPLES, len(names), (num_channels, size, size))


def _read(path: Path, size: int, mode: str) -> Tensor:
    """Read a picture, uint8 [channels, size, size]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=_FORMATS) as opened:
            num_pixels = opened.width * opened.height
            if num_pixels > MAX_PIXELS:  # only then, because it changes the pixels a little
                opened.draft(None, (size, size))
            if opened.width * opened.height > MAX_PIXELS:
                raise Image.DecompressionBombError(f"it has {num_pixels:,} pixels")
            ImageOps.exif_transpose(opened, in_place=True)  # in place, to save memory
            converted = opened if opened.mode == mode else opened.convert(mode)
            scaled = ImageOps.fit(converted, (size, size))
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{path} is too large ({error}); pictures of at most {MAX_PIXELS:,} pixels are "
            "read - scale it down, or remove it"
        ) from error
    except Exception as error:  # decoders raise all kinds for damaged files
        raise DataError(
            f"{path} is not a readable picture ({error!r:.300}); remove it or replace it"
        ) from error
    pixels = np.array(scaled).reshape(size, size, -1)
    return torch.from_numpy(pixels).permute(2, 0, 1)
