"""A model that is cut into stages computes, starts and is saved as the whole one does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgegossip.contract.protocol import Role
from edgegossip.data.dataset import ArraySplit, Dataset
from edgegossip.models import MODELS, eight_layers, vgg16
from edgegossip.models.blocks import channels_last, is_channels_last
from edgegossip.models.dropout import Dropout
from edgegossip.models.flat import FlatModel
from edgegossip.runs.describe import describe
from edgegossip.training.stages.cutting import (
    blocks,
    boundaries,
    cut,
    stage_models,
    whole_names,
)
from edgegossip.training.task import Task, Workload

PICTURE = (3, 8, 8)


def drawn(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


small = partial(eight_layers, PICTURE, 4, width=0.25)


class OwnForward(nn.Module):
    """Three blocks, one behind the other unless told otherwise."""

    def __init__(self, order: str = "in order") -> None:
        super().__init__()
        self.order = order
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.body.append(nn.ReLU(inplace=True))
        self.middle = nn.Linear(4, 4)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        z = self.middle(y)
        if self.order == "skip":
            z = z + y
        if self.order == "dropout":
            z = F.dropout(z, 0.5, self.training)
        out: Tensor = self.head(z)
        return out


NAMES = ("body", "middle", "head")

# Blocks.


def test_a_sequence_and_a_list_have_their_modules_as_blocks() -> None:
    relu = nn.ReLU()
    layers = [nn.Linear(3, 3), relu, nn.Linear(3, 3), relu]
    for model in (nn.Sequential(*layers), nn.ModuleList(layers), layers, tuple(layers)):
        assert blocks(model) == layers  # the repeated one twice


def test_vgg16_is_a_flat_list_of_layers_that_can_be_cut_anywhere() -> None:
    with torch.device("meta"):
        model, sample = vgg16((3, 32, 32), 10), torch.empty(2, 3, 32, 32)
    layers = blocks(model, is_flat=True)
    kinds = [type(layer) for layer in layers]
    assert kinds.count(nn.Conv2d) == 13
    assert kinds.count(nn.Linear) == 2
    assert nn.Sequential not in kinds
    stages = cut(model, range(1, len(layers)), is_flat=True)
    shapes = boundaries(stages, sample)
    assert len(shapes) == len(layers) - 1
    assert shapes[0] == (64, 32, 32)
    assert shapes[-1] == (512,)


def test_sequences_within_a_sequence_are_taken_apart_only_if_asked_and_without_hooks() -> None:
    inner = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(3, 2)))
    model = nn.Sequential(nn.Linear(3, 3), inner, nn.Sequential())
    assert blocks(model) == [*model]
    assert blocks(model, is_flat=True) == [model[0], inner[0], inner[1][0], model[2]]  # type: ignore[index]
    inner.register_forward_hook(lambda *_: None)
    assert blocks(model, is_flat=True) == [*model]


def test_named_blocks_are_those_of_the_module() -> None:
    model = OwnForward()
    before = copy.deepcopy(model.state_dict())
    found = blocks(model, NAMES, sample=batch(5, 4))
    assert found == [model.body, model.middle, model.head]
    paths = ("body.0", "body.1", "body.2", "middle", "head.0", "head.1")
    assert len(blocks(model, paths, sample=batch(1, 4))) == 6
    assert model.training
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert type(model.head[0]) is nn.Dropout


@pytest.mark.parametrize(
    ("order", "names", "mode"),
    [
        ("in order", ("middle", "body", "head"), "evaluation"),
        ("skip", NAMES, "evaluation"),
        ("dropout", NAMES, "training"),
    ],
)
def test_named_blocks_that_are_not_the_forward_are_refused(
    order: str, names: tuple[str, ...], mode: str
) -> None:
    message = f"in {mode} mode, the named blocks .* do not give the outputs of the OwnForward"
    with pytest.raises(ValueError, match=message):
        blocks(OwnForward(order), names, sample=batch(3, 4))


@pytest.mark.parametrize(
    ("model", "names", "message"),
    [
        (OwnForward(), None, "an? OwnForward has a forward of its own; name its blocks"),
        (OwnForward(), NAMES, "names need a sample"),
        (OwnForward(), ("body", "haed"), "unknown block 'haed'.*did you mean 'head'"),
        (OwnForward(), ("body", "body"), "have one block twice"),
        (OwnForward(), ("body", "head"), "leave out .*'middle.weight', 'middle.bias'"),
        ([nn.ReLU()], ("0",), "a list of modules runs in its order; leave out names"),
        (nn.Sequential(), None, "the Sequential has no blocks"),
        ([], None, "no blocks"),
    ],
)
def test_what_has_no_such_blocks_is_refused(
    model: nn.Module | list[nn.Module], names: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        blocks(model, names)


def test_a_sequence_with_a_forward_of_its_own_needs_names() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = 2 * super().forward(x)  # type: ignore[no-untyped-call]
            return y

    model = Doubled(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="forward of its own"):
        cut(model, [1])
    with pytest.raises(ValueError, match="do not give the outputs of the Doubled"):
        cut(model, [1], ["0", "1"], sample=batch(2, 4))


# Stages.


@pytest.mark.parametrize(
    ("name", "input_shape"),
    [("eight-layers", PICTURE), ("resnet20", PICTURE), ("mlp", (5,)), ("sensor-cnn", (2, 8))],
)
@pytest.mark.parametrize("is_training", [False, True])
def test_stages_give_the_bits_of_the_model(
    name: str, input_shape: tuple[int, ...], is_training: bool
) -> None:
    model = drawn(partial(MODELS[name], input_shape, 4)).train(is_training)
    x = batch(6, *input_shape)
    expected = model(x.clone())
    num_blocks = len(blocks(model, is_flat=True))
    for at in ([], [1], [num_blocks // 2], [num_blocks // 3, num_blocks - 1]):
        y = x.clone()
        for stage in cut(model, at, is_flat=True):
            y = stage(y.contiguous())  # as a network hands it over
        assert torch.equal(y, expected)


def test_stages_hold_the_layers_of_the_model_under_their_names() -> None:
    model = small()
    stages = cut(model, [3, 5])
    assert [len(stage) for stage in stages] == [3, 2, 3]
    held = {name: each for stage in stages for name, each in stage.named_parameters()}
    assert [*held] == [name for name, _ in model.named_parameters()]
    assert all(held[name] is each for name, each in model.named_parameters())


def test_a_stage_does_not_write_to_what_it_receives() -> None:
    """A leaf that wants its gradient could not be written to, nor may a message be."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Flatten(), nn.Sequential(nn.ReLU(inplace=True)), nn.Linear(4, 2)
    )
    for at in ([1], [2]):
        x = batch(3, 4).requires_grad_()
        before = x.detach().clone()
        cut(model, at)[1](x).sum().backward()
        assert torch.equal(x, before)
        assert x.grad is not None
    assert not model[2][0].inplace  # type: ignore[index]
    later = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True))
    assert cut(later, [1])[1][1].inplace  # it works on what is its own


def test_every_stage_lays_pictures_out_as_the_model_does() -> None:
    assert all(map(is_channels_last, cut(small(), [3, 5])))
    assert not any(map(is_channels_last, cut(nn.Sequential(*small()), [3])))
    assert channels_last(nn.Linear(4, 2))(batch(3, 4)).shape == (3, 2)  # no pictures


@pytest.mark.parametrize("at", [[0], [8], [-1], [3, 3], [5, 3], [2.0], ["conv"]])
def test_cut_points_that_are_none_are_refused(at: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cannot cut at .* 8 blocks .* from 1 to 7"):
        cut(small(), at)


def test_stages_that_would_share_a_tensor_are_refused() -> None:
    tied = nn.Linear(4, 4)
    model = nn.Sequential(tied, nn.ReLU(), tied, nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"stages 0 and 1 share the tensor '2\.weight'"):
        cut(model, [1])
    assert len(cut(model, [3])) == 2


def test_hooks_of_the_whole_model_would_belong_to_no_stage() -> None:
    model = small()
    cut(model, [1])
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="has hooks, which would belong to no stage"):
        cut(model, [1])


def test_boundaries_are_shapes_and_disturb_nothing() -> None:
    model = small().train()
    model[0][1].eval()  # type: ignore[index]
    modes = [layer.training for layer in model.modules()]
    before = copy.deepcopy(model.state_dict())
    x = batch(2, *PICTURE)
    assert boundaries(cut(model, [1, 4, 7]), x) == ((8, 8, 8), (16, 2, 2), (16,))
    assert [layer.training for layer in model.modules()] == modes
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert torch.equal(x, batch(2, *PICTURE))
    assert boundaries([model], x) == ()
    boundaries([nn.ReLU(inplace=True)], x)
    assert torch.equal(x, batch(2, *PICTURE))


def test_a_stage_that_gives_more_than_one_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="block 0 gives a tuple; a stage passes one tensor on"):
        boundaries([nn.LSTM(4, 3), nn.Identity()], batch(1, 2, 4))


# Models of a run.


def samples(num_samples: int) -> ArraySplit:
    x = (batch(num_samples, *PICTURE) * 50 + 128).clamp(0, 255).to(torch.uint8)
    return ArraySplit(x, torch.arange(num_samples) % 4)


def workload(*, at: tuple[int, ...] | None, seed: int = 0) -> Workload:
    """Make the workload of a model that is cut there, or of a whole one."""
    data = Dataset("noise", samples(16), samples(8), num_classes=4, input_shape=PICTURE)
    task = Task(dataset=data, model=small if at is None else stage_models(small, at))
    num_stages = 1 if at is None else len(at) + 1
    return Workload(task, range(num_stages), seed, lambda rank: Role(f"stage-{rank}"))


@pytest.mark.parametrize("seed", [0, 1])
def test_stages_of_a_run_start_from_the_whole_model_of_the_same_seed(seed: int) -> None:
    whole, staged = (workload(at=at, seed=seed) for at in (None, (2, 5)))
    parts = {rank: staged.initial_params(rank) for rank in range(3)}
    joined, _ = staged.average(parts)
    assert torch.equal(joined, whole.initial_params())
    assert staged.evaluate(joined) == whole.evaluate(whole.initial_params())


def test_what_is_saved_of_stages_fits_the_whole_model() -> None:
    whole, staged = (workload(at=at) for at in (None, (2, 5)))
    joined, _ = staged.average({rank: staged.initial_params(rank) for rank in range(3)})
    saved = staged.named_parameters(joined)
    assert {name.partition(".")[0] for name in saved} == {"stage-0", "stage-1", "stage-2"}
    expected = whole.named_parameters(whole.initial_params())
    renamed = whole_names(saved)
    assert [*renamed] == [*expected]
    assert all(torch.equal(renamed[name], each) for name, each in expected.items())


def test_a_maker_gives_the_same_whenever_it_is_called_and_whatever_was_drawn_before() -> None:
    make = stage_models(small, [2, 5])["stage-1"]
    first = drawn(make)

    def later() -> nn.Module:
        torch.rand(7)
        return make()

    for again in (drawn(make), drawn(later)):
        assert torch.equal(FlatModel(copy.deepcopy(first)).params, FlatModel(again).params)
    assert not torch.equal(FlatModel(first).params, FlatModel(drawn(make, seed=1)).params)


def test_a_maker_leaves_the_generator_where_it_was() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        torch.rand(2)
        state = torch.get_rng_state()
        stage_models(small, [2])["stage-1"]()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.initial_seed() == 3


def test_a_stage_with_nothing_to_train_is_no_model() -> None:
    def frozen() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))

    make = stage_models(frozen, [1])["stage-1"]
    with pytest.raises(ValueError, match=r"cut at \[1\], stage 1 has nothing to train"):
        make()


def test_named_blocks_make_stages_too_and_are_described_in_a_run_folder() -> None:
    models = stage_models(OwnForward, (1, 2), NAMES, sample=batch(2, 4))
    parts = [drawn(make) for make in models.values()]
    assert [
        *whole_names(nn.ModuleDict(dict(zip(models, parts, strict=True))).state_dict())
    ] == [*OwnForward().state_dict()]
    assert describe(models)["stage-1"] == {
        "type": "StageMaker",
        "make": "OwnForward",
        "stage": 1,
        "at": [1, 2],
        "names": ["body", "middle", "head"],
        "sample": "tensor[2, 4]",
        "is_flat": False,
    }
    assert models == stage_models(OwnForward, [1, 2], [*NAMES], sample=batch(2, 4))


def test_dropout_may_be_among_and_within_named_blocks() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training)

    class WithDropout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.drop, self.other = nn.Linear(4, 4), Dropout(0.5), Dropping()
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.other(self.drop(self.body(x))))
            return y

    names = ("body", "drop", "other", "head")
    assert len(cut(WithDropout(), [2], names, sample=batch(4, 4))) == 2
