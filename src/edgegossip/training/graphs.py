"""Training steps as CUDA graphs, which a GPU repeats without Python between their kernels.

A graph repeats its kernels on the same memory. Everything that changes from step to step is
therefore copied into tensors of the graph before it is repeated: samples, learning rates, and
the optimizer's state if another learner, a checkpoint or a fresh start has replaced it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgegossip.data.nested import Nested, leaves, map_leaves

TakeStep: TypeAlias = Callable[[Nested], Tensor]
"""Takes a step on inputs that are on the device; returns its loss, a scalar."""

NUM_EAGER = 3
"""Steps without a graph before one is captured, in which libraries prepare themselves; PyTorch
recommends as many. They are usual steps of the training."""
MOST_GRAPHS = 4
"""Maximum number of graphs of one model copy, each of which keeps its memory."""
_LOG = logging.getLogger("edgegossip.training")
_RECORDING = threading.Lock()
"""Learners train in parallel threads; only one captures at a time."""
_SAID: set[str] = set()
"""Reasons that were logged; all copies of a model have the same."""


class Graphed(Protocol):
    """A `ModelCopy`, as far as its steps are concerned."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Updates `trained`."""

    @property
    def trained(self) -> Sequence[Tensor]:
        """The trained tensors."""

    @property
    def dropout(self) -> torch.Generator:
        """Generator from which dropout layers draw."""


@dataclass(slots=True, eq=False)
class _Graph:
    """A captured step.

    Attributes:
        inputs: Tensors from which the graph reads a batch.
        rates: Learning rate of each group of the optimizer, a scalar on the device.
        rates_set: The values of `rates`, as far as they are known.
        state: The optimizer's tensors of each trained tensor, by name.
        loss: Loss of the last repetition, a scalar.
        repeat: Repeats the step.
    """

    inputs: Nested
    rates: list[Tensor]
    rates_set: list[float]
    state: list[dict[str, Tensor]]
    loss: Tensor
    repeat: Callable[[], None]


class StepGraphs:
    """The graphs of one model copy.

    A graph is captured after `NUM_EAGER` steps of the same shapes and momentum. Where a step
    cannot be captured, all steps stay eager, and the log says why.

    Args:
        owner: What the steps change.
        torch_device: Device of the model.
    """

    def __init__(self, owner: Graphed, torch_device: torch.device) -> None:
        self._owner = owner
        self._torch_device = torch_device
        self._graphs: dict[Hashable, _Graph] = {}
        self._num_eager: dict[Hashable, int] = {}
        self._names: list[set[str]] | None = None  # in the optimizer's state, after eager steps
        self._bound: _Graph | None = None  # its tensors are the optimizer's
        self._recorder = recorder(torch_device)
        self._is_off = self._recorder is None

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make a new optimizer keep on the device all that changes from step to step."""
        self._bound = None
        if self._recorder is None:
            return
        name = type(optimizer).__name__
        if not type(optimizer).__module__.startswith("torch.optim."):
            self._stay_eager(f"{name} is not PyTorch's, so its state may be anywhere")
            return
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            elif isinstance(optimizer, torch.optim.SGD) and not group["foreach"]:
                group["fused"] = True  # the only one of its kernels that reads the rate itself
            else:
                self._stay_eager(f"PyTorch cannot capture {name} with these settings")
                return
        # The first steps are not captured, of which PyTorch would warn.
        vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True

    def release(self) -> None:
        """Note that the optimizer's state has been replaced."""
        self._bound = None

    def take(self, key: Hashable, inputs: Nested, step: TakeStep) -> Tensor:
        """Take a step, by a graph if there is one; return its loss.

        Args:
            key: Equal if `step` does the same with inputs of equal shapes. Tensors that `step`
                reads besides must live as long as `key`.
            inputs: Tensors on the device.
            step: Takes the step on such inputs.
        """
        if self._is_off:
            return step(inputs)
        groups = self._owner.optimizer.param_groups
        key = (key, _shapes(inputs), tuple(group.get("momentum") for group in groups))
        graph = self._graphs.get(key)
        if graph is None and self._is_due(key):
            graph = self._graphs[key] = self._captured(inputs, step)
        if graph is None or not self._bind(graph):
            return self._take_eagerly(key, inputs, step)
        for own, new in zip(_tensors(graph.inputs), _tensors(inputs), strict=True):
            own.copy_(new)
        wanted = [group["lr"] for group in groups]
        if wanted != graph.rates_set:
            for rate, value in zip(graph.rates, wanted, strict=True):
                rate.fill_(value)
            graph.rates_set = wanted
        graph.repeat()
        return graph.loss.clone()  # the next repetition overwrites it

    def _is_due(self, key: Hashable) -> bool:
        has_room = len(self._graphs) < MOST_GRAPHS
        is_prepared = self._num_eager.get(key, 0) >= NUM_EAGER
        # The first step of a fresh optimizer makes its state, so it differs from all others.
        return has_room and is_prepared and [*map(set, self._state())] == self._names

    def _take_eagerly(self, key: Hashable, inputs: Nested, step: TakeStep) -> Tensor:
        self._bound = None
        number = self._num_eager[key] = self._num_eager.get(key, 0) + 1
        if self._recorder is None or number > NUM_EAGER:
            loss = step(inputs)
        else:
            take = step if number < NUM_EAGER else partial(self._take_watched, step)
            with self._recorder.aside():
                loss = take(inputs)
        self._names = [*map(set, self._state())]
        return loss

    def _take_watched(self, step: TakeStep, inputs: Nested) -> Tensor:
        """Take a step in the form that would be captured, to see whether it can be."""
        before = self._state()
        with self._rates(), HostWatch(self._torch_device) as watch:
            loss = step(inputs)
        if watch.found is not None:
            self._stay_eager(f"{watch.found} needs the host")
        for own, old in zip(self._owner.trained, before, strict=True):
            for name, value in self._owner.optimizer.state.get(own, {}).items():
                is_kept = isinstance(value, Tensor) and old.get(name, value) is value
                if value is not None and not is_kept:
                    self._stay_eager(f"the optimizer replaces {name!r} in its state")
        return loss

    def _captured(self, inputs: Nested, step: TakeStep) -> _Graph:
        own = map_leaves(torch.clone, inputs)
        with self._rates() as rates:
            assert self._recorder is not None
            loss, repeat = self._recorder.record(lambda: step(own), [self._owner.dropout])
        return _Graph(own, rates, [], self._state(), loss, repeat)

    @contextmanager
    def _rates(self) -> Iterator[list[Tensor]]:
        """Let the optimizer read its rates from tensors."""
        groups = self._owner.optimizer.param_groups
        before = [group["lr"] for group in groups]
        rates = [torch.tensor(each, device=self._torch_device) for each in before]
        try:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            yield rates
        finally:
            for group, each in zip(groups, before, strict=True):
                group["lr"] = each

    def _state(self) -> list[dict[str, Tensor]]:
        state = self._owner.optimizer.state
        return [
            {k: v for k, v in state.get(each, {}).items() if isinstance(v, Tensor)}
            for each in self._owner.trained
        ]

    def _bind(self, graph: _Graph) -> bool:
        """Give the optimizer the graph's tensors, with the values of its own.

        False if it has none yet: then an eager step has to make them.
        """
        if self._bound is graph:
            return True
        found = self._state()
        if [*map(set, found)] != [*map(set, graph.state)]:
            return False
        for each, own, theirs in zip(self._owner.trained, graph.state, found, strict=True):
            for name, tensor in own.items():
                if theirs[name] is not tensor:
                    tensor.copy_(theirs[name])
                    self._owner.optimizer.state[each][name] = tensor
        self._bound = graph
        return True

    def _stay_eager(self, reason: str) -> None:
        _say_why_eager(reason)
        self._is_off = True


def _say_why_eager(reason: str) -> None:
    if reason not in _SAID:
        _LOG.warning("cuda_graph has no effect: %s", reason)
        _SAID.add(reason)


class StackGraphs:
    """The graphs of a stack, whose steps use the same tensors from its beginning to its end.

    Args:
        generators: All generators from which steps draw.
        torch_device: Device of the stack.
    """

    def __init__(
        self, generators: Iterable[torch.Generator], torch_device: torch.device
    ) -> None:
        self._generators = generators
        self._torch_device = torch_device
        self._num_eager: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[Nested, Tensor, Callable[[], None]]] = {}
        self._recorder = recorder(torch_device)

    def take(self, key: Hashable, inputs: Nested, step: TakeStep) -> Tensor:
        """Take a step, by a graph if there is one; return its losses. See `StepGraphs.take`."""
        if self._recorder is None:
            return step(inputs)
        key = (key, _shapes(inputs))
        if key not in self._graphs:
            number = self._num_eager[key] = self._num_eager.get(key, 0) + 1
            if number <= NUM_EAGER or len(self._graphs) == MOST_GRAPHS:
                return self._take_eagerly(self._recorder, inputs, step)
            own = map_leaves(torch.clone, inputs)
            recorded = self._recorder.record(lambda: step(own), self._generators)
            self._graphs[key] = (own, *recorded)
        own, losses, repeat = self._graphs[key]
        for mine, new in zip(_tensors(own), _tensors(inputs), strict=True):
            mine.copy_(new)
        repeat()
        return losses.clone()  # the next repetition overwrites them

    def _take_eagerly(self, recorder: Recorder, inputs: Nested, step: TakeStep) -> Tensor:
        with recorder.aside(), HostWatch(self._torch_device) as watch:
            losses = step(inputs)
        if watch.found is not None:
            _say_why_eager(f"{watch.found} needs the host")
            self._recorder = None
        return losses


def _tensors(nested: Nested) -> list[Tensor]:
    return [leaf for _, leaf in leaves(nested)]


def _shapes(inputs: Nested) -> tuple[object, ...]:
    return tuple((path, each.shape, each.stride(), each.dtype) for path, each in leaves(inputs))


class HostWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds operations that a graph cannot repeat, because they read from or write to the host.

    Args:
        torch_device: Device on which all tensors should be.

    Attributes:
        found: Name of the first such operation; None if there was none.
    """

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = torch_device.type
        self.found: str | None = None

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        # Before the operation, because some fail where they read nothing.
        if self.found is None and self._reads(func, args):
            self.found = str(func)
        result = func(*args, **(kwargs or {}))
        if self.found is None and self._is_elsewhere(func, (args, kwargs, result)):
            self.found = str(func)
        return result

    @staticmethod
    def _reads(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
        if torch.Tag.data_dependent_output in func.tags:
            return True
        if torch.Tag.dynamic_output_shape not in func.tags:
            return False
        # Indexing has a shape that depends on values only if an index is a mask.
        is_indexing = func.overloadpacket is torch.ops.aten.index
        masks = (torch.bool, torch.uint8)
        return not is_indexing or any(i is not None and i.dtype in masks for i in args[1])

    def _is_elsewhere(self, func: torch._ops.OpOverload, values: object) -> bool:
        found = (each for each in tree_leaves(values) if isinstance(each, Tensor))
        away = [each for each in found if each.device.type != self._type]
        # Attention keeps the seed of its dropout on the host, unless it is captured.
        is_seed = "attention" in str(func) and all(each.ndim == 0 for each in away)
        return bool(away) and not is_seed


class Recorder:
    """Captures steps on a GPU, on a stream of its own.

    Args:
        torch_device: The GPU.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self._stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Compute on this stream, after and before all else on the current one."""
        current = torch.cuda.current_stream(self._torch_device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(
        self, run: Callable[[], Tensor], generators: Iterable[torch.Generator]
    ) -> tuple[Tensor, Callable[[], None]]:
        """Capture what `run` does, without doing it.

        Args:
            run: Computes a tensor.
            generators: All generators from which it draws.

        Returns:
            The tensor, which has its value after each repetition, and a function that repeats.

        Raises:
            RuntimeError: If CUDA cannot capture it. PyTorch's allocator and generators are then
                in the middle of a capture, so training cannot go on in this process.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        try:
            with _RECORDING, self.aside():
                torch.cuda.synchronize(self._torch_device)
                # In this mode, other threads may use the GPU meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    loss = run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RuntimeError(
                f"the training step cannot be captured ({reason:.300}); leave out cuda_graph"
            ) from error
        return loss, graph.replay


def recorder(torch_device: torch.device) -> Recorder | None:
    """The recorder of a device; None if it has no graphs."""
    # PyTorch 2.4 could not register generators.
    is_able = hasattr(torch.cuda.CUDAGraph, "register_generator_state")
    return Recorder(torch_device) if torch_device.type == "cuda" and is_able else None
