"""A stand-in for CUDA graphs on a CPU: repeats recorded operations on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_of(values: object) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


class Tape(TorchDispatchMode):
    """Records operations, with the tensors that they read and write.

    It records by executing, so it keeps what they overwrite, for `undo`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._overwritten: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        for value, argument in zip(args, func._schema.arguments, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            # The schema of batch norm does not tell that it writes its running statistics.
            if is_written or "running" in argument.name:
                for each in tensors_of(value):
                    place = (each.data_ptr(), each.shape, each.stride())
                    self._overwritten.setdefault(place, (each.detach(), each.detach().clone()))
        result = func(*args, **kwargs)
        self._operations.append((func, args, kwargs, result))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        for tensor, before in reversed(self._overwritten.values()):
            tensor.copy_(before)

    @torch.no_grad()
    def repeat(self) -> None:
        for func, args, kwargs, recorded in self._operations:
            new = tensors_of(func(*args, **kwargs))
            for own, each in zip(tensors_of(recorded), new, strict=True):
                if own.data_ptr() != each.data_ptr():
                    own.detach().copy_(each)


class TapeRecorder:
    """Records as `edgegossip.training.graphs.Recorder` does.

    Attributes:
        num_recorded: Number of recorded steps.
        num_repeated: Number of repetitions.
    """

    def __init__(self) -> None:
        self.num_recorded = self.num_repeated = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def record(
        self, run: Callable[[], Tensor], generator: torch.Generator | None
    ) -> tuple[Tensor, Callable[[], None]]:
        self.num_recorded += 1
        before = None if generator is None else generator.get_state()
        with Tape() as tape:
            loss = run()
        tape.undo()
        if generator is not None and before is not None:
            generator.set_state(before)
        loss = loss.detach()

        def repeat() -> None:
            self.num_repeated += 1
            tape.repeat()

        return loss, repeat
