"""Texts in pieces, and a small GPT that learns them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from edgegossip.contract.errors import DataError
from edgegossip.data.texts import books, texts
from edgegossip.models import gpt
from edgegossip.training.loss import next_token


def write(folder: Path, **contents: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.txt").write_text(content)
    return sorted(folder.glob("*.txt"))


def test_pieces_overlap_by_the_byte_that_is_only_a_target(tmp_path: Path) -> None:
    [path] = write(tmp_path, one="abcdefghij" * 2)
    data = texts("one", [path], context=4, test_share=0.25)
    train = data.train.batch(torch.arange(len(data.train)))
    assert [bytes(piece.tolist()) for piece in train] == [b"abcde", b"efghi", b"ijabc"]
    test = data.test.batch(torch.arange(len(data.test)))
    assert [bytes(piece.tolist()) for piece in test] == [b"fghij"]


def test_each_book_is_a_subject(tmp_path: Path) -> None:
    write(tmp_path / "books", b="b" * 100, a="a" * 50)
    data = books(tmp_path, context=4)
    assert data.subjects is not None
    first = data.train.batch(torch.arange(len(data.train)))[:, 0]
    assert first[data.subjects == 0].unique().tolist() == [ord("a")]
    assert first[data.subjects == 1].unique().tolist() == [ord("b")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no \.txt file in .*books; put plain texts there, one of each author"),
        ("short", "too few for training and testing in pieces of 9; give a longer text or a"),
    ],
)
def test_missing_and_short_texts_are_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        write(tmp_path / "books", a=content)
    with pytest.raises(DataError, match=message):
        books(tmp_path, context=8)


def small_gpt() -> nn.Module:
    return gpt(16, context=8, width=16, num_layers=2, num_heads=2)


def test_no_token_knows_those_after_it() -> None:
    model = small_gpt()
    ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 5:] = (ids[:, 5:] + 1) % 16
    before, after = model(ids).detach(), model(changed).detach()
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_targets_are_the_next_tokens() -> None:
    tokens = torch.arange(9, dtype=torch.uint8).view(1, 9)
    outputs, targets = next_token(small_gpt(), tokens)
    assert outputs.shape == (1, 8, 16)
    assert (targets.dtype, targets.tolist()) == (torch.int64, [[*range(1, 9)]])


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"batch is a torch.float32 tensor of shape \[1, 9\]; next"
    ):
        next_token(small_gpt(), torch.zeros(1, 9))
    with pytest.raises(
        DataError, match="batch is a dict; next_token takes one of whole numbers"
    ):
        next_token(small_gpt(), {})
    with pytest.raises(ValueError, match="got 9 tokens, more than the context of 8"):
        small_gpt()(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match="width 10 is not a multiple of num_heads 4"):
        gpt(8, 8, width=10)
