"""Scaling of a model's numbers of channels."""

from __future__ import annotations


def scaled(num_channels: int, width: float, model: str) -> int:
    """Round `width` times `num_channels` to a multiple of 8, at most 10 % below the product.

    Args:
        num_channels: Number of channels, or of hidden units, in the full model.
        width: Factor on the channels, above 0 and at most 4.
        model: Name of the model, for the message.

    Raises:
        ValueError: If the width is out of range.

    References:
        Sandler et al., "MobileNetV2", arXiv:1801.04381, and the rounding of its authors' code.

    >>> scaled(24, 0.5, "mobilenet_v2"), scaled(24, 0.25, "mobilenet_v2")
    (16, 8)
    """
    if not 0 < width <= 4:
        raise ValueError(f"{model} takes a width above 0 and up to 4, got {width}")
    nearest = max(8, int(num_channels * width + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * num_channels * width else nearest + 8
