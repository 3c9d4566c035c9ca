"""One vector holds the model: what is done to it is done to the layers, and back."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.dense_models import flat_data, stacked
from tests.small_learners import OPTIMIZERS
from tests.small_runs import ctrl_c_at, small_model, small_run, small_task, tensors
from tests.stage_runs import KINDS, run_of_kind
from tests.stopped_runs import left
from tests.tiers import first, thorough
from torch import Tensor, nn

from edgegossip.contract.errors import Interrupted
from edgegossip.models.flat import FlatModel
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.runner import run
from edgegossip.training import copies as model_copies, evaluator


def seeded_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return small_model()


def pictures() -> Tensor:
    return torch.rand(5, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def test_the_vector_holds_what_the_model_held() -> None:
    module = seeded_model()
    before = copy.deepcopy(module.state_dict())
    flat = FlatModel(module)
    assert flat.num_params == sum(t.numel() for t in before.values() if t.is_floating_point())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_parts_of_larger_tensors_are_laid_out_without_gaps() -> None:
    module = nn.Module()
    module.part = nn.Parameter(torch.arange(20.0).view(4, 5)[:, :3].detach())
    module.last = nn.Parameter(torch.full((2,), -1.0))
    module.register_buffer("spread", torch.ones(1).expand(3))
    flat = FlatModel(module)
    rows = torch.arange(20.0).view(4, 5)[:, :3].flatten()
    assert flat.params.tolist() == [*rows.tolist(), -1.0, -1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("has_buffers", [True, False])
def test_a_flat_model_computes_the_same(has_buffers: bool) -> None:
    plain, x = seeded_model().eval(), pictures()
    flat = FlatModel(copy.deepcopy(plain), has_buffers=has_buffers)
    torch.testing.assert_close(flat.module.eval()(x), plain(x))


def test_writing_to_the_vector_writes_to_every_layer_and_back() -> None:
    flat = FlatModel(seeded_model())
    flat.values.fill_(2.0)
    for tensor in [*flat.module.parameters(), *flat.module.buffers()]:
        assert not tensor.is_floating_point() or bool((tensor == 2).all())
    with torch.no_grad():
        flat.module[0].bias.zero_()  # type: ignore[index]
    assert int((flat.params == 0).sum()) == 4


def test_the_backward_pass_fills_one_gradient() -> None:
    flat, plain = FlatModel(seeded_model()), seeded_model()
    y = torch.tensor([0, 1, 2, 0, 1])
    for module in (flat.module.eval(), plain.eval()):
        F.cross_entropy(module(pictures()), y).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    assert flat.trained.grad is not None
    torch.testing.assert_close(
        flat.trained.grad.sort().values, expected.sort().values, rtol=1e-4, atol=1e-6
    )
    flat.zero_grad()
    assert all(not p.grad.any() for p in flat.module.parameters() if p.grad is not None)


def test_a_mask_with_infinite_values_stays_with_the_module() -> None:
    model = seeded_model()
    size = FlatModel(copy.deepcopy(model)).num_params
    mask = torch.full((4, 4), -math.inf).triu(1)
    model.register_buffer("mask", mask)
    flat = FlatModel(model)
    flat.load(torch.zeros(flat.num_params))
    assert flat.num_params == size
    assert model.get_buffer("mask") is mask


@pytest.mark.parametrize("start", [math.inf, math.nan])
def test_statistics_that_training_has_yet_to_find_are_exchanged(start: float) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("least", torch.full((3,), start))
    assert FlatModel(model).num_params == 3 + 3


def test_a_buffer_of_two_modules_stays_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared = torch.ones(3)
    for layer in model:
        layer.register_buffer("shared", shared)
    flat = FlatModel(model)
    assert flat.num_params == 2 * 6 + 3
    model[0].get_buffer("shared").fill_(5.0)
    assert model[1].get_buffer("shared").tolist() == flat.params[-3:].tolist() == [5.0] * 3


def test_without_buffers_they_stay_with_the_module() -> None:
    flat = FlatModel(seeded_model(), has_buffers=False)
    assert flat.num_params == flat.trained.numel()
    flat.values.zero_()
    assert flat.module[1].running_var.tolist() == [1.0] * 4  # type: ignore[index]


def test_counters_never_travel() -> None:
    flat = FlatModel(seeded_model())
    flat.module.train()(pictures())
    assert int(flat.module[1].num_batches_tracked) == 1  # type: ignore[index]
    assert flat.num_params - flat.trained.numel() == 8  # running mean and variance of 4


def test_aligned_tensors_have_gaps_that_nobody_sees() -> None:
    flat, aligned = FlatModel(seeded_model()), FlatModel(seeded_model(), alignment=64)
    for tensor in [*aligned.module.parameters(), *aligned.moved_buffers]:
        assert tensor.storage_offset() % 16 == 0
    assert len(aligned.values) > aligned.num_params == flat.num_params
    assert torch.equal(aligned.params, flat.params)
    assert aligned.num_trained == flat.num_trained == flat.trained.numel()
    y = torch.tensor([0, 1, 2, 0, 1])
    for some in (flat, aligned):
        F.cross_entropy(some.module.eval()(pictures()), y).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(flat.module.parameters(), aligned.module.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)
    written = torch.arange(float(flat.num_params))
    aligned.load(written)
    assert torch.equal(aligned.params, written)
    assert int(aligned.values.count_nonzero()) == flat.num_params - 1


def whole_or_stages(name: str) -> Experiment:
    if name in KINDS:
        return run_of_kind(name)
    if name == "together":
        return small_run(task=stacked(dataset=flat_data(80)))
    return small_run(task=small_task(optimizer=OPTIMIZERS[name]))


@thorough
@pytest.mark.parametrize("name", ["together", *first(2, OPTIMIZERS), *first(1, KINDS)])
def test_runs_see_no_gaps_and_go_on_with_them(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = whole_or_stages(name)
    run(some, out=tmp_path / "without", num_threads=1)
    monkeypatch.setattr(model_copies, "FlatModel", partial(FlatModel, alignment=64))
    monkeypatch.setattr(evaluator, "FlatModel", partial(FlatModel, alignment=64))
    run(some, out=tmp_path / "with", num_threads=1)
    with ctrl_c_at(15, some.algorithm), pytest.raises(Interrupted, match="--resume"):
        run(some, out=tmp_path / "stopped", num_threads=1)
    run(some, out=tmp_path / "stopped", num_threads=1, resume=True)
    assert left(tmp_path / "stopped") == left(tmp_path / "with")
    without, found = tensors(tmp_path / "without"), tensors(tmp_path / "with")
    for key, tensor in without.items():
        torch.testing.assert_close(found[key], tensor)


def test_a_copy_shares_nothing() -> None:
    flat = FlatModel(seeded_model())
    other = FlatModel(copy.deepcopy(flat.module))
    assert torch.equal(other.params, flat.params)
    other.values.zero_()
    assert bool(flat.params.any())


def test_tied_weights_are_held_once() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    flat = FlatModel(nn.Sequential(first, second))
    assert flat.num_params == 9
    flat.load(torch.eye(3).flatten())
    assert torch.equal(second.weight, torch.eye(3))


def test_frozen_parameters_stay_out_of_the_vector() -> None:
    first = nn.Linear(2, 3)
    for parameter in first.parameters():
        parameter.requires_grad_(False)
    before = first.weight.clone()
    flat = FlatModel(nn.Sequential(first, nn.Linear(3, 1)))
    assert flat.num_params == 4
    flat.values.zero_()
    assert torch.equal(first.weight, before)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), "needs a single"),
        (nn.Sequential(nn.ReLU()), "Sequential has nothing to train"),
        (nn.Linear(2, 2).requires_grad_(False), "Linear has nothing to train"),
    ],
    ids=["two types", "no parameters", "all frozen"],
)
def test_a_model_that_is_no_vector_of_one_type_is_refused(
    module: nn.Module, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FlatModel(module)


def test_three_dimensional_convolutions_are_taken_as_well() -> None:
    module = nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(16, 3))
    flat = FlatModel(module)
    assert flat.num_params == 2 * 8 + 2 + 16 * 3 + 3
    assert module(torch.zeros(1, 1, 3, 3, 3)).shape == (1, 3)


def test_a_convolution_with_one_input_channel_keeps_the_layout() -> None:
    model = FlatModel(nn.Conv2d(1, 6, kernel_size=5))
    outputs = model.module(torch.zeros(2, 1, 8, 8))
    assert outputs.is_contiguous(memory_format=torch.channels_last)
