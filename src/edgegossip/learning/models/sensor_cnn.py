"""A small convolutional network for windows of sensor data."""

from __future__ import annotations

from torch import nn


def sensor_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Build a network of three convolutions over time: 65,350 parameters for UCI HAR.

    The mean over time before the output makes the network independent of the position of events
    in the window, and of the window's length.

    Args:
        input_shape: (channels, length) of a window, with a length of at least 4; (9, 128) in
            UCI HAR.
        num_classes: Number of classes: the size of the output.

    Raises:
        ValueError: If samples are not such windows.

    >>> sum(parameter.numel() for parameter in sensor_cnn((9, 128), 6).parameters())
    65350
    """
    match input_shape:
        case (channels, length) if length >= 4:
            pass
        case _:
            raise ValueError(
                "sensor_cnn takes windows (channels, length) with a length of at least 4, "
                f"got input_shape={input_shape}; use a model for pictures, or mlp"
            )
    return nn.Sequential(
        nn.Conv1d(channels, 64, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool1d(2),
        nn.Conv1d(64, 64, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool1d(2),
        nn.Conv1d(64, 128, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )
