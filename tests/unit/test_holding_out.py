"""Validation splits: who is drawn, what stays, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import TensorDataset

from edgegossip.contract.errors import DataError
from edgegossip.data.dataset import ArraySplit, Dataset, Split, from_torch
from edgegossip.data.hold_out import hold_out

NUM_TRAIN = 120


def numbered(num_train: int = NUM_TRAIN, num_classes: int = 3, **fields: Any) -> Dataset:  # noqa: ANN401
    """Each training sample is its own number, a test sample is below 0."""
    labels = torch.arange(num_train) % num_classes
    train = ArraySplit(torch.arange(num_train).float().view(-1, 1), labels)
    test = ArraySplit(-torch.ones(5, 1), torch.zeros(5, dtype=torch.int64))
    return Dataset("numbers", train, test, num_classes, (1,), **fields)


def numbers(split: Split | None) -> list[int]:
    assert split is not None
    x, y = split.batch(torch.arange(len(split)))
    assert torch.equal(split.labels, y)
    return [int(each) for each in x.flatten()]


@given(st.integers(2, 60), st.integers(1, 5), st.floats(0.01, 0.99), st.integers(0, 3))
def test_the_training_samples_are_divided_class_by_class(
    num_train: int, num_classes: int, share: float, seed: int
) -> None:
    data = numbered(num_train, num_classes)
    if not 0 < round(share * num_train) < num_train:
        with pytest.raises(ValueError, match="both splits need at least 1"):
            hold_out(data, share, seed=seed)
        return
    divided = hold_out(data, share, seed=seed)
    kept, held = numbers(divided.train), numbers(divided.validation)
    assert sorted(kept + held) == list(range(num_train))
    assert len(held) == round(share * num_train)
    for label in range(num_classes):
        of_class = sum(number % num_classes == label for number in range(num_train))
        of_held = sum(number % num_classes == label for number in held)
        assert abs(of_held - share * of_class) < 1 + 1e-9
    assert divided.test is data.test


def test_the_same_seed_holds_out_the_same_samples_and_another_one_others() -> None:
    held = [numbers(hold_out(numbered(), seed=seed).validation) for seed in (0, 0, 1)]
    assert held[0] == held[1] != held[2]


def test_what_is_known_of_the_training_samples_follows_them() -> None:
    data = numbered(subjects=torch.arange(NUM_TRAIN) // 10, mean=torch.ones(1))
    divided = hold_out(data, 0.25)
    assert divided.subjects is not None
    assert divided.subjects.tolist() == [number // 10 for number in numbers(divided.train)]
    assert divided.mean is data.mean


def test_whole_subjects_are_held_out() -> None:
    data = numbered(subjects=torch.arange(NUM_TRAIN) // 10)
    divided = hold_out(data, 0.25, by_subject=True)
    assert divided.subjects is not None
    held = {number // 10 for number in numbers(divided.validation)}
    assert len(held) == 3
    assert set(divided.subjects.tolist()) == set(range(12)) - held
    assert len(numbers(divided.validation)) == 30


def test_one_subject_at_least_is_held_out() -> None:
    data = numbered(subjects=torch.arange(NUM_TRAIN) // 10)
    assert len(numbers(hold_out(data, 0.01, by_subject=True).validation)) == 10


def test_samples_that_do_not_lie_in_memory_are_divided_alike() -> None:
    x = torch.arange(NUM_TRAIN).float().view(-1, 1)
    pairs = TensorDataset(x, torch.arange(NUM_TRAIN) % 3)
    divided = hold_out(from_torch("numbers", pairs, pairs, num_classes=3))
    expected = hold_out(numbered())
    assert numbers(divided.train) == numbers(expected.train)
    assert numbers(divided.validation) == numbers(expected.validation)


@pytest.mark.parametrize("share", [-0.1, 0.0, 1.0, 1.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\)"):
        hold_out(numbered(), share)


def test_data_is_held_out_once() -> None:
    with pytest.raises(ValueError, match="'numbers' has a validation split"):
        hold_out(hold_out(numbered()))


def test_subjects_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="has no subjects"):
        hold_out(numbered(), by_subject=True)


def test_subjects_that_are_all_held_out_are_refused() -> None:
    data = numbered(subjects=torch.zeros(NUM_TRAIN, dtype=torch.int64))
    with pytest.raises(ValueError, match="holds out 120 of 120"):
        hold_out(data, by_subject=True)


def test_the_test_split_is_no_validation_split() -> None:
    data = numbered()
    with pytest.raises(DataError, match="numbers: the validation split is the test split"):
        replace(data, validation=data.test)


def test_a_wrong_validation_split_is_named() -> None:
    wrong = ArraySplit(torch.zeros(2, 1), torch.tensor([0, 3]))
    with pytest.raises(DataError, match="numbers, validation split: label 3 of sample 1"):
        numbered(validation=wrong)
