"""Splits, validation, preparation and augmentation of samples."""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset as TorchDataset,
    IterableDataset,
    TensorDataset,
)

from edgegossip.contract.errors import DataError
from edgegossip.data.dataset import (
    ArraySplit,
    Dataset,
    TorchSplit,
    channel_statistics,
    from_torch,
)
from edgegossip.data.pictures import flip_and_crop

MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])


def pictures(num_samples: int = 64, num_channels: int = 3, size: int = 32) -> Tensor:
    stream = torch.Generator().manual_seed(0)
    shape = (num_samples, num_channels, size, size)
    return torch.randint(256, shape, generator=stream, dtype=torch.uint8)


def dataset(
    x: Tensor,
    y: Tensor | None = None,
    test: ArraySplit | None = None,
    **fields: Any,  # noqa: ANN401
) -> Dataset:
    train = ArraySplit(x, torch.zeros(len(x), dtype=torch.int64) if y is None else y)
    return Dataset(
        "task", train, train if test is None else test, 3, tuple(x.shape[1:]), **fields
    )


class Listed(TorchDataset[Any]):
    """A map-style data set that counts how often a sample is read."""

    def __init__(self, samples: list[Any], labels: list[Any]) -> None:
        self.samples, self.labels, self.num_reads = samples, labels, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.num_reads += 1
        return self.samples[index], self.labels[index]


class WithTargets(Listed):
    @property
    def targets(self) -> list[Any]:
        return self.labels


def test_pictures_are_prepared_as_x_over_255_minus_mean_over_std() -> None:
    x = pictures()
    task = dataset(x, mean=MEAN, std=STD)
    expected = (x.double() / 255 - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)
    prepared = task.prepare(x)
    assert prepared.dtype == torch.float32
    torch.testing.assert_close(prepared, expected.float(), rtol=1e-5, atol=1e-6)


def test_features_are_prepared_without_the_255() -> None:
    x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    task = dataset(x, mean=torch.tensor([2.0, 20.0]), std=torch.tensor([1.0, 10.0]))
    assert task.prepare(x).tolist() == [[-1.0, -1.0], [1.0, 1.0]]


def test_preparing_never_writes_to_the_raw_samples() -> None:
    for x in (pictures(2), torch.rand(2, 3, 4)):
        before = x.clone()
        dataset(x, mean=MEAN, std=STD).prepare(x)
        assert torch.equal(x, before)


def test_features_without_mean_and_std_are_returned_as_they_are() -> None:
    x = torch.rand(2, 5)
    assert dataset(x).prepare(x) is x


def test_preparing_a_batch_costs_less_than_the_formula_written_out() -> None:
    x = pictures()
    task, mean, std = dataset(x, mean=MEAN, std=STD), MEAN.view(3, 1, 1), STD.view(3, 1, 1)
    folded = min(timeit.repeat(lambda: task.prepare(x), number=20, repeat=10))
    written_out = min(timeit.repeat(lambda: (x / 255 - mean) / std, number=20, repeat=10))
    assert folded < written_out


def test_statistics_make_the_training_samples_standard() -> None:
    x = pictures(num_samples=10_000, size=2)  # more than one chunk
    mean, std = channel_statistics(x)
    prepared = dataset(x, mean=mean, std=std).prepare(x)
    torch.testing.assert_close(prepared.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        prepared.std((0, 2, 3), correction=0), torch.ones(3), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("constant", [0.0, 0.1, 0.40171730518341064])
def test_a_constant_channel_is_not_blown_up(constant: float) -> None:
    x = torch.full((999, 2), constant)  # its variance rounds to more than 0
    _, std = channel_statistics(x)
    assert std.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("label", [-1, 3])
def test_label_out_of_range_is_refused_with_split_sample_and_range(label: int) -> None:
    x = torch.rand(4, 2)
    wrong = ArraySplit(x, torch.tensor([0, 1, label, 2]))
    message = rf"task, test split: label {label} of sample 2 is out of range; expected 0 \.\. 2"
    with pytest.raises(DataError, match=message):
        dataset(x, test=wrong)


def test_samples_and_labels_of_different_number_are_refused() -> None:
    with pytest.raises(DataError, match=r"train split: labels have shape \[3\].*\[4\]"):
        dataset(torch.rand(4, 2), torch.zeros(3, dtype=torch.int64))


def test_fractional_labels_are_refused() -> None:
    with pytest.raises(DataError, match=r"torch\.float32; expected one torch\.int64"):
        dataset(torch.rand(4, 2), torch.full((4,), 0.5))


def test_empty_split_is_refused() -> None:
    with pytest.raises(DataError, match="train split: no samples; expected at least 1"):
        dataset(torch.rand(0, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_feature_that_is_not_finite_is_refused_with_its_place(value: float) -> None:
    x = torch.zeros(4, 2, 3)
    x[2, 1, 0] = value
    with pytest.raises(DataError, match=rf"train split: sample 2 has {value} at \[1, 0\]"):
        dataset(x)


def test_splits_of_different_shape_are_refused() -> None:
    other = ArraySplit(torch.rand(1, 5), torch.tensor([0]))
    with pytest.raises(
        DataError, match=r"test split: samples have shape \[5\].*expected \[2\]"
    ):
        dataset(torch.rand(4, 2), test=other)


def test_double_precision_features_are_refused() -> None:
    with pytest.raises(DataError, match=r"torch\.float64; expected.*torch\.float32"):
        dataset(torch.zeros(4, 2, dtype=torch.float64))


def test_subjects_of_another_number_are_refused() -> None:
    with pytest.raises(DataError, match=r"subjects have shape \[2\].*\[4\]"):
        dataset(torch.rand(4, 2), subjects=torch.tensor([1, 2]))


def test_mean_and_std_must_fit_the_channels() -> None:
    with pytest.raises(ValueError, match=r"mean must have one value for each channel, \[3\]"):
        dataset(pictures(2), mean=torch.zeros(1))
    with pytest.raises(ValueError, match="std must be > 0"):
        dataset(pictures(2), std=torch.tensor([1.0, 0.0, 1.0]))


def test_torch_data_set_gives_batches_in_the_order_of_the_indices() -> None:
    x, y = torch.rand(5, 3), torch.tensor([0, 1, 2, 1, 0])
    task = from_torch("pairs", TensorDataset(x, y), TensorDataset(x, y), num_classes=3)
    batch, labels = task.train.batch(torch.tensor([4, 1]))
    assert torch.equal(batch, x[[4, 1]])
    assert torch.equal(labels, y[[4, 1]])
    assert torch.equal(task.train.labels, y)


def test_torch_data_set_may_yield_arrays_and_plain_labels() -> None:
    split = TorchSplit(
        Listed([np.zeros((1, 2), np.uint8)] * 3, [0, np.int64(2), 1]), has_classes=True
    )
    x, y = split.batch(torch.arange(3))
    assert (x.dtype, x.shape) == (torch.uint8, (3, 1, 2))
    assert (y.dtype, y.tolist()) == (torch.int64, [0, 2, 1])
    assert split.labels.tolist() == [0, 2, 1]


def test_labels_are_read_from_targets_without_touching_a_sample() -> None:
    listed = WithTargets([torch.zeros(2)] * 3, [0, 2, 1])
    assert TorchSplit(listed, has_classes=True).labels.tolist() == [0, 2, 1]
    assert listed.num_reads == 0


def test_labels_are_those_that_are_trained_on_and_not_what_they_are_made_of() -> None:
    listed = WithTargets([torch.zeros(2)] * 3, [0, 2, 1])
    listed.target_transform = abs  # type: ignore[attr-defined]
    assert TorchSplit(listed, has_classes=True).labels.tolist() == [0, 2, 1]
    assert listed.num_reads == 3


def test_labels_without_targets_are_read_once() -> None:
    listed = Listed([torch.zeros(2)] * 3, [0, 2, 1])
    split = TorchSplit(listed, has_classes=True)
    assert listed.num_reads == 0
    for _ in range(2):
        assert split.labels.tolist() == [0, 2, 1]
    assert listed.num_reads == 3


def test_torch_data_set_of_other_objects_is_refused_with_a_way_out() -> None:
    listed = Listed([object()] * 2, [0, 1])
    with pytest.raises(
        DataError, match=r"give the data set a transform.*found <class 'object'>"
    ):
        from_torch("objects", listed, listed, num_classes=2)


class Stream(IterableDataset[Any]):
    """Has no samples by number."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(2), 0)])


PAIRS = TensorDataset(torch.zeros(2, 3), torch.tensor([0, 1]))


@pytest.mark.parametrize("num_classes", [0, 2])
@pytest.mark.parametrize("other", [Stream(), DataLoader(PAIRS), iter(PAIRS)], ids=type)
def test_data_that_is_not_map_style_is_refused(other: Any, num_classes: int) -> None:  # noqa: ANN401
    for train, test, where in ((other, PAIRS, "train"), (PAIRS, other, "test")):
        with pytest.raises(DataError, match=f"^mine, {where} split: .* is not a map-style"):
            from_torch("mine", train, test, num_classes)


@pytest.mark.parametrize(
    "y",
    [
        pytest.param([torch.tensor([[0], [1]])], id="labels in columns"),
        pytest.param([torch.eye(2)], id="one-hot labels"),
        pytest.param([torch.tensor([0, 1])] * 2, id="triples"),
        pytest.param([], id="x alone"),
    ],
)
def test_samples_with_classes_are_pairs_with_one_label_each(y: list[Tensor]) -> None:
    wrong = TensorDataset(torch.zeros(2, 3), *y)
    with pytest.raises(DataError, match=r"must be pairs \(x, y\) with one whole number y, but"):
        from_torch("odd", wrong, wrong, num_classes=2)


def test_samples_with_classes_have_one_shape() -> None:
    odd = Listed([torch.zeros(2), torch.zeros(3)], [0, 1])
    with pytest.raises(DataError, match=r"all of one shape.*stack expects") as caught:
        TorchSplit(odd, has_classes=True).batch(torch.arange(2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("num_classes", [0, 2])
def test_torch_data_set_without_samples_is_refused(num_classes: int) -> None:
    empty = TensorDataset(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(DataError, match="none, train split: no samples; expected at least 1"):
        from_torch("none", empty, PAIRS, num_classes)


def test_torch_data_set_with_fractional_labels_is_refused() -> None:
    listed = WithTargets([torch.zeros(2)] * 2, [0.5, 1.0])
    with pytest.raises(DataError, match=r"expected one torch\.int64"):
        from_torch("fractions", listed, listed, num_classes=2)


@settings(max_examples=30)
@given(seed=st.integers(0, 100), padding=st.integers(0, 3), is_picture=st.booleans())
def test_each_augmented_picture_is_a_crop_of_itself_or_its_mirror_image(
    seed: int, padding: int, is_picture: bool
) -> None:
    x = pictures(num_samples=4, num_channels=2, size=5)
    x = x if is_picture else x / 255
    stream = torch.Generator().manual_seed(seed)
    augmented = flip_and_crop(x, stream, padding)
    assert (augmented.dtype, augmented.shape) == (x.dtype, x.shape)
    for before, after in zip(x, augmented, strict=True):
        crops = [
            torch.nn.functional.pad(picture, (padding,) * 4)[:, top : top + 5, left : left + 5]
            for picture in (before, before.flip(2))
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
        ]
        assert any(torch.equal(after, crop) for crop in crops)


def test_augmentation_draws_every_shift_and_mirroring_alike() -> None:
    # One bright pixel in the middle shows the shift; a dark one right of it the mirroring.
    x = torch.zeros(9000, 1, 5, 5)
    x[:, 0, 2, 2], x[:, 0, 2, 3] = 2.0, 1.0
    augmented = flip_and_crop(x, torch.Generator().manual_seed(0), padding=1)
    places = (augmented == 2).flatten(1).int().argmax(1).bincount(minlength=25).view(5, 5)
    assert places[1:4, 1:4].sum() == 9000
    # Nine shifts: 1000 each with a standard deviation of 30.
    assert ((places[1:4, 1:4] - 1000).abs() < 150).all()
    dark = (augmented == 1).flatten(1).int().argmax(1)
    bright = (augmented == 2).flatten(1).int().argmax(1)
    assert abs(int((dark < bright).sum()) - 4500) < 240  # five standard deviations


def test_equal_generators_augment_alike() -> None:
    first, second = (
        flip_and_crop(pictures(), torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_negative_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="padding must be at least 0, got -1"):
        flip_and_crop(pictures(1), torch.Generator(), padding=-1)


def test_only_pictures_are_flipped_and_cropped() -> None:
    with pytest.raises(ValueError, match=r"must be \[batch, channels.*got \[5, 9\]"):
        flip_and_crop(torch.zeros(5, 9), torch.Generator())
