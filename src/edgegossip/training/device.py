"""The device on which a worker computes."""

from __future__ import annotations

import warnings

import torch

AUTO = "auto"
"""Stands for the best device of the machine: a GPU (cuda), else Apple's (mps), else cpu."""


def chosen_device(torch_device: str) -> str:
    """Return the name of the device that `torch_device` stands for.

    "auto" is decided by each process for its own machine. A GPU that is there but cannot be
    used is an error, because training on the CPU instead would be unexpectedly slow.

    Raises:
        ValueError: If the device cannot be used.
    """
    usable = _usable()
    name = usable[0] if torch_device == AUTO else torch_device
    try:
        torch.empty(0, device=name)
    # Built without CUDA, or without a device that is in a package of its own.
    except (RuntimeError, AssertionError, ImportError) as error:
        # PyTorch adds all its backends, on one line.
        reason = str(error).partition("\n")[0].partition(". ")[0]
        allowed = ", ".join(map(repr, (AUTO, *usable)))
        raise ValueError(
            f"torch_device {torch_device!r} cannot be used ({reason:.300}); choose one of "
            f"{allowed}"
        ) from error
    return name


def _usable() -> list[str]:
    """The devices of this machine, the best first."""
    found = []
    if torch.cuda.is_available():
        number = torch.cuda.device_count()
        found += ["cuda", *(f"cuda:{index}" for index in range(number) if number > 1)]
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def require_autocast(torch_device: torch.device, dtype: torch.dtype) -> None:
    """Check that `torch.autocast` computes in `dtype` on a device.

    PyTorch only warns where it does not, and computes in full precision.

    Raises:
        ValueError: If it does not.
    """
    kind, reason = torch_device.type, "PyTorch computes in full precision there"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with torch.autocast(kind, dtype):
                is_on = torch.is_autocast_enabled(kind)
        except (RuntimeError, UserWarning) as error:
            is_on, reason = False, " ".join(str(error).split())
    if not is_on:
        raise ValueError(
            f"autocast to {dtype} does nothing on {kind!r} ({reason:.300}); leave out autocast "
            "for the workers on this device (workers of one run may differ in it)"
        )
