"""Workers whose vectors have other tensors at the same place do not average them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.errors import NetworkError
from edgegossip.contract.topology import complete
from edgegossip.models.flat import FlatModel, described
from edgegossip.net.host.introduction import Introduction
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.introduction import MAX_LISTED, compared_tensors
from edgegossip.real.training_loop import TrainingLoop


class TwoLayers(nn.Module):
    def __init__(self, *, is_swapped: bool = False) -> None:
        super().__init__()
        for name in ("b", "a") if is_swapped else ("a", "b"):
            setattr(self, name, nn.Linear(2, 2, bias=False))


def ends_of_two(
    make_model: Callable[[int], nn.Module], num_rounds: int = 2
) -> list[BaseException | None]:
    """How a run of two loops with these models ends."""
    network = MemoryNetwork()
    ends: list[BaseException | None] = [None, None]

    def work(rank: int) -> None:
        model = make_model(rank)
        algorithm = Gossip(topology=complete(2), num_rounds=num_rounds)
        loop = TrainingLoop(
            model, algorithm, rank, 2, network.transport(rank), num_samples=4, meet_seconds=5.0
        )
        try:
            with loop:
                while not loop.is_over:
                    loop.step(1.0, num_samples=4)
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return ends


def require_refused(ends: list[BaseException | None], what: str) -> None:
    first, second = ends
    assert isinstance(first, NetworkError)
    assert isinstance(second, NetworkError)
    assert "other workers take part in another run: worker 1 has " + what in str(first)


def test_layers_in_another_order_are_another_run() -> None:
    ends = ends_of_two(lambda rank: TwoLayers(is_swapped=rank == 1))
    require_refused(
        ends, 'tensor 0 "b.weight float32 [2, 2]", this one "a.weight float32 [2, 2]"'
    )


def test_another_type_of_numbers_is_another_run() -> None:
    ends = ends_of_two(lambda rank: nn.Linear(2, 1).to((torch.float32, torch.bfloat16)[rank]))
    require_refused(ends, 'tensor 0 "weight bfloat16 [1, 2]", this one "weight float32 [1, 2]"')


def test_another_layout_in_memory_is_another_run() -> None:
    formats = (torch.contiguous_format, torch.channels_last)
    ends = ends_of_two(lambda rank: nn.Conv2d(2, 2, 3).to(memory_format=formats[rank]))  # type: ignore[call-overload]
    require_refused(ends, 'tensor 0 "weight float32 [2, 2, 3, 3] with strides [18, 1, 6, 2]"')


def test_buffers_that_only_one_exchanges_are_told() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    with_buffers = described(FlatModel(model).module, has_buffers=True)
    assert with_buffers == [
        "0.weight float32 [2]",
        "0.bias float32 [2]",
        "0.running_mean float32 [2]",
        "0.running_var float32 [2]",
    ]
    assert described(model, has_buffers=False) == with_buffers[:2]


def test_a_compiled_model_has_the_names_of_a_plain_one() -> None:
    class Compiled(nn.Module):  # as `torch.compile` makes it
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

    plain = nn.Sequential(nn.Linear(2, 1))
    assert described(Compiled(plain), has_buffers=True) == described(plain, has_buffers=True)


def test_other_initial_parameters_are_allowed_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make_model(rank: int) -> nn.Module:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, float(rank))
        return model

    with caplog.at_level(logging.WARNING, "edgegossip.net"):
        assert ends_of_two(make_model) == [None, None]
    assert (
        "worker 1 has other initial parameters: numbers may differ, which is allowed"
        in caplog.text
    )


def test_a_model_of_very_many_tensors_with_long_names_can_be_introduced() -> None:
    names = [f"{'model.layer.' * 10}{index}.weight float32 [8, 4]" for index in range(5000)]
    settings = compared_tensors(names)
    assert len(settings) == MAX_LISTED + 1
    assert '"tensor 0": "...' in Introduction(settings=settings).text()
    names[-1] += "6"
    assert [
        name for name, value in compared_tensors(names).items() if settings[name] != value
    ] == ["tensors"]
