"""The models of a run by role, and the whole model made from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from edgegossip.contract.metrics import consensus_distance
from edgegossip.models.flat import FlatModel, laid_out

Join: TypeAlias = Callable[[Mapping[str, nn.Module]], nn.Module]
"""Builds the whole model from the parts, by role name, without copies."""


def in_sequence(parts: Mapping[str, nn.Module]) -> nn.Sequential:
    """Join parts in sequence, in the order of the task's roles.

    >>> whole = in_sequence({"device": nn.Linear(3, 2), "cloud": nn.Linear(2, 1)})
    >>> [name for name, _ in whole.named_parameters()]
    ['device.weight', 'device.bias', 'cloud.weight', 'cloud.bias']
    """
    whole = nn.Sequential()
    for role, part in parts.items():
        whole.add_module(role, part)
    return whole


class Parts:
    """Averages the parameters of each part over its workers, and joins these averages.

    Args:
        models: One model for each role, changed in place; a single model is the whole model.
        join: Joins the models if there are several.
        has_buffers: As in `FlatModel`.

    Attributes:
        models: Initial model of the workers of each role.
        whole: The joined model.

    Raises:
        ValueError: If the whole model does not consist of exactly the parts' tensors.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], join: Join, *, has_buffers: bool
    ) -> None:
        self.models = {
            role: FlatModel(model, has_buffers=has_buffers) for role, model in models.items()
        }
        parts = copy.deepcopy(dict(models))
        whole = join(parts) if len(parts) > 1 else next(iter(parts.values()))
        self._joined = FlatModel(whole, has_buffers=has_buffers)
        self.whole = self._joined.module
        tensors = {role: laid_out(part, has_buffers) for role, part in parts.items()}
        self._require_no_more_than(tensors)
        # Each tensor is one stretch of the vector, with one order in part and whole.
        self._stretches = {
            role: [(each.storage_offset(), each.numel()) for each in found]
            for role, found in tensors.items()
        }

    def _require_no_more_than(self, tensors: Mapping[str, list[Tensor]]) -> None:
        own = self._joined.params.untyped_storage().data_ptr()
        given = [each for found in tensors.values() for each in found]
        num_given = sum(each.numel() for each in given)
        num_joined = self._joined.num_params
        is_within = all(each.untyped_storage().data_ptr() == own for each in given)
        if num_given != num_joined or not is_within:
            raise ValueError(
                f"join made a model of {num_joined} parameters out of parts with {num_given}; "
                "it must take each part as it is, no copy, and add no parameters"
            )

    def average(self, estimates: Mapping[str, Tensor]) -> tuple[Tensor, float]:
        """Average and join the parts; also return the consensus distance.

        Args:
            estimates: [num_workers, num_params] of each role.

        Returns:
            The joined means, and the root of the summed squares of the parts' consensus
            distances. If all roles have the same number of workers, this root is the consensus
            distance of whole models.
        """
        whole = torch.empty_like(self._joined.params)
        for role, stacked in estimates.items():
            self._put(whole, role, stacked.mean(0))
        return whole, math.hypot(*map(consensus_distance, estimates.values()))

    def replace(self, whole: Tensor, role: str, part: Tensor) -> Tensor:
        """Return a copy of the vector `whole`, with `part` as the part of `role`."""
        replaced = whole.clone()
        self._put(replaced, role, part)
        return replaced

    def _put(self, whole: Tensor, role: str, part: Tensor) -> None:
        start = 0
        for offset, length in self._stretches[role]:
            whole[offset : offset + length] = part[start : start + length]
            start += length
