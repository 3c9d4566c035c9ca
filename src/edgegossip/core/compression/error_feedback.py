"""Error feedback: the part that a compressor holds back is added to the next vector."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edgegossip.core.compression.compressor import Compressor
from edgegossip.core.protocol import Payload


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """Result of a call to `feed_back`.

    Attributes:
        payload: Payload to send.
        sent: Vector that receivers see, [numel].
        error: Part held back and added to the next vector, [numel].
    """

    payload: Payload
    sent: Tensor
    error: Tensor


def feed_back(
    compressor: Compressor, vector: Tensor, error: Tensor, *key: int | str
) -> Feedback:
    r"""Compress `vector` plus the previous error, and compute the new error.

    .. math:: v = x + e, \qquad q = C(v), \qquad e' = v - q

    so that the sum of all sent vectors plus the current error equals the sum of all vectors, up
    to rounding. With a compressor that contracts by :math:`\delta` and vectors of norm at most
    :math:`G`, :math:`\|e\|` stays below :math:`2 G / \delta`.

    Args:
        compressor: C.
        vector: x, [numel].
        error: e, [numel]; initially zero.
        key: Key of the random stream, as for `compress`.

    References:
        Karimireddy, Rebjock, Stich and Jaggi, ICML 2019, arXiv:1901.09847, algorithm 2 and
        lemma 3.

    >>> import torch
    >>> from edgegossip.core.compression.sparse import TopK
    >>> turn = feed_back(TopK(0.5), torch.tensor([3.0, 2.0]), torch.tensor([0.0, 2.0]))
    >>> turn.sent, turn.error
    (tensor([0., 4.]), tensor([3., 0.]))
    """
    wanted = vector + error
    payload = compressor.compress(wanted, *key)
    sent = compressor.decompress(payload, wanted.numel())
    return Feedback(payload, sent, wanted - sent)
