"""Data sets of nested samples: dealt, batched and held out as any others."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset, TensorDataset

from edgegossip.contract.errors import DataError
from edgegossip.data.dataset import ArraySplit, Dataset, from_tensors, from_torch
from edgegossip.data.hold_out import hold_out
from edgegossip.data.nested import map_leaves, num_samples
from edgegossip.data.partition import IID, BySubject, Dirichlet, LabelSkew, Proportional

X = torch.arange(40.0).view(20, 2)
Y = torch.arange(20)


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class Rows(TorchDataset[Any]):
    """Yields one sample for each of some rows."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        return self.rows[index]


def dicts() -> Dataset:
    samples = {"x": X, "more": (Y, {"mask": Y % 2})}
    return from_tensors("dicts", samples, map_leaves(lambda leaf: leaf[:5], samples))


def test_every_leaf_is_batched_alike() -> None:
    batch = dicts().train.batch(torch.tensor([3, 1]))
    assert batch["x"].tolist() == [[6.0, 7.0], [2.0, 3.0]]
    assert batch["more"][0].tolist() == [3, 1]
    assert batch["more"][1]["mask"].tolist() == [1, 1]


def test_structures_are_kept() -> None:
    changed = map_leaves(lambda leaf: leaf + 1, [Point(X, Y), UserDict(z=Y)])
    assert isinstance(changed, list)
    assert isinstance(changed[0], Point)
    assert changed[0].y.tolist() == (Y + 1).tolist()
    assert isinstance(changed[1], dict)


@pytest.mark.parametrize("partition", [IID(), Proportional((1.0, 2.0, 1.0))])
def test_nested_samples_are_dealt_like_others(partition: Any) -> None:  # noqa: ANN401
    split = ArraySplit(X, Y % 2)
    classified = Dataset("points", split, split, num_classes=2, input_shape=(2,))
    for own, other in zip(partition(dicts(), 3, 7), partition(classified, 3, 7), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("partition", [Dirichlet(0.5), LabelSkew(0.5)])
def test_what_has_no_classes_is_not_dealt_by_class(partition: Any) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match="'dicts' has no classes; use IID"):
        partition(dicts(), 2, 0)


def test_nested_samples_of_people_stay_together() -> None:
    data = Dataset("people", dicts().train, dicts().test, subjects=Y % 4)
    shards = BySubject()(data, 2, 0)
    assert [set((Y % 4)[shard].tolist()) for shard in shards] == [{0, 2}, {1, 3}]


def test_nested_samples_are_held_out_once_and_for_all() -> None:
    held = hold_out(dicts(), share=0.25, seed=3)
    assert held.validation is not None
    ids = [
        split.batch(torch.arange(len(split)))["more"][0]
        for split in (held.train, held.validation)
    ]
    assert sorted(torch.cat(ids).tolist()) == Y.tolist()
    assert len(ids[1]) == 5
    again = hold_out(dicts(), share=0.25, seed=3).validation
    assert again is not None
    assert torch.equal(
        again.batch(torch.arange(5))["x"], held.validation.batch(torch.arange(5))["x"]
    )


def test_map_style_data_sets_may_yield_anything_that_collates() -> None:
    rows = [{"ids": torch.tensor([i, i]), "label": i} for i in range(4)]
    data = from_torch("rows", Rows(rows), Rows(rows[:2]))
    batch = data.train.batch(torch.tensor([2, 0]))
    assert batch["ids"].tolist() == [[2, 2], [0, 0]]
    assert batch["label"].tolist() == [2, 0]
    assert hold_out(data, 0.5).train.batch(torch.tensor([0]))["label"].numel() == 1


def test_pairs_without_classes_know_the_shape_of_x() -> None:
    pairs = TensorDataset(X, X[:, 0])
    assert from_torch("pairs", pairs, pairs).input_shape == (2,)
    x, y = from_torch("pairs", pairs, pairs).train.batch(torch.tensor([1]))
    assert (x.tolist(), y.tolist()) == ([[2.0, 3.0]], [2.0])


def test_a_collate_function_pads_what_differs_in_length() -> None:
    def pad(samples: list[Tensor]) -> dict[str, Tensor]:
        return {"ids": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)}

    rows = Rows([torch.ones(1 + i) for i in range(3)])
    data = from_torch("texts", rows, rows, collate=pad)
    assert data.train.batch(torch.tensor([0, 2]))["ids"].tolist() == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (
            {"x": X, "y": Y[:7]},
            r"odd: a batch has tensors of unequal length, 20 at \['x'\] and 7",
        ),
        ({"x": X, "y": torch.tensor(1.0)}, r"odd: a batch has a single number at \['y'\]"),
        (
            {"x": X, "name": "text"},
            r"odd: a batch holds str 'text' at \['name'\]; expected tens",
        ),
        ({}, "odd: a batch has no tensor; give it at least one"),
        ((X.double(), Y), r"train split: numbers at \[0\] are torch.float64.* with .float\(\)"),
        (
            (X * torch.inf, Y),
            r"train split: sample 0 has nan at \[0\] of \[0\]; expected finite",
        ),
        ((X[:0], Y[:0]), "train split: no samples; expected at least 1"),
    ],
)
def test_samples_of_odd_structure_are_refused_in_one_line(samples: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(DataError, match=message) as caught:
        from_tensors("odd", samples, samples)
    assert "\n" not in str(caught.value)


def test_splits_of_other_structure_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"test split: samples have .*'x'.* expected those of the"
    ):
        from_tensors("odd", {"x": X, "y": Y}, {"x": X})


def test_samples_that_do_not_collate_are_refused_in_one_line() -> None:
    rows = Rows([torch.ones(1), torch.ones(2)])
    data = from_torch("odd", Rows(rows.rows[:1]), rows)
    with pytest.raises(
        DataError, match=r"samples \[0, 1\] do not make a batch .* collate func"
    ) as caught:
        data.test.batch(torch.tensor([0, 1]))
    assert "\n" not in str(caught.value)


def test_a_collate_function_that_loses_samples_is_refused() -> None:
    rows = Rows([torch.ones(1), torch.ones(1)])
    data = from_torch("odd", rows, rows, collate=lambda samples: samples[0])
    with pytest.raises(DataError, match="a batch of 1 out of 2 samples; it must keep them all"):
        data.train.batch(torch.tensor([0, 1]))


def test_channels_are_of_pairs() -> None:
    split = ArraySplit({"x": X})
    with pytest.raises(ValueError, match=r"mean needs an input_shape, and samples .* pairs"):
        Dataset("odd", split, split, mean=torch.zeros(2))


def test_samples_are_counted_by_their_first_dimension() -> None:
    assert num_samples([X, {"y": Y}]) == 20
