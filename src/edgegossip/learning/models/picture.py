"""Validation of the shapes of pictures."""

from __future__ import annotations

from collections.abc import Sequence

SMALL = range(8, 65)
"""Sides, in pixels, for models adapted from pictures of 224 x 224."""


def picture_shape(
    model: str, input_shape: tuple[int, ...], sides: Sequence[int]
) -> tuple[int, int]:
    """Return (channels, side) from the shape of a square picture.

    Args:
        model: Name of the model, for the message.
        input_shape: Shape of one sample, (channels, height, width).
        sides: Allowed heights, in pixels.

    Raises:
        ValueError: If the sample is not a square picture, or its side is out of range.

    >>> picture_shape("lenet5", (1, 28, 28), (28, 32))
    (1, 28)
    """
    match input_shape:
        case (channels, height, width) if height == width and height in sides:
            return channels, height
    is_range = isinstance(sides, range) and len(sides) > 1
    allowed = f"{sides[0]} to {sides[-1]}" if is_range else " or ".join(map(str, sides))
    raise ValueError(
        f"{model} takes square pictures (channels, height, width) with a height of {allowed}, "
        f"got input_shape={input_shape}; resize them, or use a model that takes any shape (mlp)"
    )
