"""Plain texts as samples for language models: pieces of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from edgegossip.contract.errors import DataError
from edgegossip.contract.ranges import check_range
from edgegossip.data.dataset import ArraySplit, Dataset


def texts(
    name: str, paths: Sequence[Path | str], context: int = 128, test_share: float = 0.1
) -> Dataset:
    """Cut text files into pieces of ``context + 1`` bytes, for `next_token`.

    The last byte of a piece is the first of the next, and a remainder that is too short is
    omitted. The end of each file is for testing. Pieces of one file share one subject, so
    `BySubject` keeps a file on one worker.

    Args:
        name: Name for reports and messages.
        paths: The files, in the order of their subjects.
        context: Length of the model's input, in bytes, at least 1.
        test_share: Share of each file for testing, in (0, 1).

    Raises:
        DataError: If there is no file, or a file is missing or too short.
        ValueError: If a number is out of range.
    """
    check_range("context", context, "at least 1")
    check_range("test_share", test_share, "in (0, 1)")
    train, test, subjects = list[Tensor](), list[Tensor](), list[Tensor]()
    for subject, path in enumerate(map(Path, paths)):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{name}: cannot read {path}: {error.strerror}") from error
        end = len(content) - round(test_share * len(content))
        for part, kept in ((content[:end], train), (content[end:], test)):
            kept.append(_pieces(part, context))
            if not len(kept[-1]):
                raise DataError(
                    f"{name}: {path} has {len(content)} bytes, too few for training and "
                    f"testing in pieces of {context + 1}; give a longer text or a smaller "
                    "context"
                )
        subjects.append(torch.full((len(train[-1]),), subject))
    if not train:
        raise DataError(f"{name}: no text file; give at least one")
    return Dataset(
        name,
        ArraySplit(torch.cat(train)),
        ArraySplit(torch.cat(test)),
        subjects=torch.cat(subjects),
    )


def books(data_dir: Path | str, context: int = 128) -> Dataset:
    """Read a text of each author: all `.txt` files in `data_dir`/books.

    The last tenth of each file is for testing. Files are subjects, in alphabetical order.

    Args:
        data_dir: Folder that contains the folder `books`.
        context: As in `texts`.

    Raises:
        DataError: If there is no file, or a file is too short.
    """
    folder = Path(data_dir) / "books"
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise DataError(
            f"no .txt file in {folder}; put plain texts there, one of each author, e.g. from "
            "https://www.gutenberg.org or NLTK's Gutenberg corpus, or name their parent folder "
            "with --data-dir or EDGEGOSSIP_DATA"
        )
    return texts("books", paths, context)


def _pieces(content: bytes, context: int) -> Tensor:
    """Pieces of ``context + 1`` bytes, uint8 [num_pieces, context + 1]."""
    if len(content) <= context:
        return torch.empty(0, context + 1, dtype=torch.uint8)
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return whole.unfold(0, context + 1, context).contiguous()
