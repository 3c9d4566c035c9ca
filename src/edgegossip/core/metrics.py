"""Measures for runs of any algorithm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from edgegossip.core.protocol import Payload


def consensus_distance(params: Tensor) -> float:
    r"""Distance of workers from agreement: :math:`\sqrt{\frac1n \sum_i \|x_i - \bar x\|^2}`.

    Exactly 0 if all float32 parameters agree.

    Args:
        params: One row for each worker, [num_workers, num_params].

    Raises:
        ValueError: If `params` is not two-dimensional, or has no rows.

    >>> consensus_distance(torch.tensor([[0.0, 0.0], [6.0, 8.0]]))
    5.0
    """
    if params.ndim != 2 or len(params) == 0:
        raise ValueError(
            f"params must be [num_workers, num_params], got shape {list(params.shape)}; "
            "stack one row for each worker"
        )
    mean = params.mean(dim=0, dtype=torch.float64)
    return float(torch.linalg.vector_norm(params - mean)) / math.sqrt(len(params))


def staleness(receiver_round: int, message_round: int) -> int:
    """Staleness of a message for its receiver, in rounds; 0 if the sender is ahead.

    >>> staleness(receiver_round=7, message_round=5), staleness(5, 7)
    (2, 0)
    """
    return receiver_round - message_round if receiver_round > message_round else 0


def payload_num_bytes(payload: Payload) -> int:
    """Bytes of all tensors, without names and header.

    >>> payload_num_bytes({"params": torch.zeros(3), "age": torch.zeros(1, dtype=torch.int8)})
    13
    """
    return sum(tensor.nbytes for tensor in payload.values())
