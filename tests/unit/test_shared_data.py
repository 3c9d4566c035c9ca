"""Shared data: units of an epoch, batches of units, and what needs them."""

from __future__ import annotations

import pytest
import torch

import edgegossip as eg
from edgegossip.contract.errors import LocalProtocolError
from edgegossip.contract.protocol import Units
from edgegossip.data.partition import unit_sizes, units_of
from edgegossip.training.sampling.batches import BatchStream, UnitTable
from edgegossip.training.sampling.sampler import AccuracyAwareSampler, Batch
from edgegossip.training.sampling.selection import Random


def stream(num_samples: int = 1000, units: UnitTable | None = None) -> BatchStream:
    sampler = AccuracyAwareSampler(num_samples=num_samples, batch_size=64, selection=Random())
    return BatchStream(sampler, units=units)


@pytest.mark.parametrize("num_samples", [1, 2, 255, 256, 257, 1000])
def test_units_hold_each_sample_once_in_a_new_order_each_epoch(num_samples: int) -> None:
    first, second = (units_of(num_samples, 256, seed=0, epoch=epoch) for epoch in (0, 1))
    assert torch.equal(torch.cat(first).sort().values, torch.arange(num_samples))
    assert [len(unit) for unit in first] == unit_sizes(num_samples, 256)
    assert num_samples < 3 or not torch.equal(torch.cat(first), torch.cat(second))


def test_all_units_visit_each_sample_once_at_the_cost_that_was_announced() -> None:
    batches = stream(units=UnitTable(1000, 256, seed=0))
    visits = torch.zeros(1000)
    for units in ((0, 2), (1,), (3,)):
        work = Units(5, units)
        cost = batches.cost(work)
        taken = [part for part in batches.take(work) if isinstance(part, Batch)]
        assert cost == sum(map(len, taken))
        visits += torch.cat([part.positions for part in taken]).bincount(minlength=1000)
    assert bool((visits == 1).all())


def test_units_are_an_error_without_shared_data_and_beyond_the_last_one() -> None:
    with pytest.raises(LocalProtocolError, match="Shared"):
        stream().cost(Units(0, (0,)))
    with pytest.raises(LocalProtocolError, match="got Units"):
        stream(units=UnitTable(1000, 256, seed=0)).cost(Units(0, (4,)))


@pytest.mark.parametrize(("epoch", "indices"), [(-1, (0,)), (0, ()), (0, (-1,))])
def test_units_out_of_range_are_an_error(epoch: int, indices: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        Units(epoch, indices)


def test_only_claimed_work_trains_on_shared_data() -> None:
    task = eg.Task(
        dataset=eg.digits(), model=lambda: eg.mlp((1, 8, 8), 10), partition=eg.Shared()
    )
    inner = eg.EpochGossip(topology=eg.complete(2), num_rounds=1)
    with pytest.raises(ValueError, match="ClaimedWork"):
        eg.Experiment(task=task, algorithm=inner, platforms=eg.uneven(2))
    experiment = eg.Experiment(
        task=task, algorithm=eg.ClaimedWork(inner=inner), platforms=eg.uneven(2)
    )
    assert [len(shard) for shard in experiment.workload().shards.values()] == [1437] * 2
