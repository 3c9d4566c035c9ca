"""Hooks on modules."""

from __future__ import annotations

from torch import nn


def hooks(module: nn.Module) -> list[object]:
    """The hooks of `module` itself, not of its children."""
    kinds = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return [hook for each in kinds for hook in each.values()]
