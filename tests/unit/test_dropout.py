"""Dropout is PyTorch's, but for where its masks come from."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from edgegossip.contract.errors import TrainingError
from edgegossip.models.dropout import ChannelDropout, Dropout, replace_dropout


def dropout(p: float, seed: int = 0) -> Dropout:
    layer = Dropout(p)
    layer.generator = torch.Generator().manual_seed(seed)
    return layer


def test_kept_entries_are_scaled_so_that_the_mean_stays() -> None:
    y = dropout(0.2)(torch.ones(100_000))
    assert set(y.tolist()) == {0.0, 1.25}
    # Standard deviation of the mean: sqrt(p / (1 - p) / n) = 0.0016.
    assert float(y.mean()) == pytest.approx(1, abs=0.006)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout1d, (50, 40, 3)),
        (nn.Dropout2d, (50, 40, 3, 2)),
        (nn.Dropout3d, (50, 40, 2, 1, 2)),
    ],
)
def test_channels_are_kept_or_dropped_as_a_whole(
    kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(kind(0.2))
    replace_dropout(model, torch.Generator().manual_seed(0))
    assert isinstance(model[0], ChannelDropout)
    y = model(torch.ones(shape)).flatten(2)
    assert torch.equal(y.amin(2), y.amax(2))
    assert {*y.flatten().tolist()} == {0.0, 1.25}
    # Standard deviation of the mean over 2,000 channels: 0.011.
    assert float(y.mean()) == pytest.approx(1, abs=0.04)


def test_gradient_passes_the_same_mask() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = dropout(0.5)(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropping_nothing_or_all_is_what_pytorch_does(p: float) -> None:
    x = torch.arange(5.0)
    assert torch.equal(dropout(p)(x), nn.Dropout(p)(x))


def test_nothing_is_drawn_in_evaluation_mode() -> None:
    x = torch.arange(5.0)
    assert Dropout(0.5).eval()(x) is x


def test_global_generator_is_neither_read_nor_moved() -> None:
    x = torch.ones(100)
    before = torch.random.get_rng_state()
    first = dropout(0.5)(x)
    assert torch.equal(torch.random.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        assert torch.equal(dropout(0.5)(x), first)


def test_models_in_threads_at_once_draw_what_they_draw_alone() -> None:
    def masks(seed: int) -> Tensor:
        layer = dropout(0.5, seed)
        return torch.stack([layer(torch.ones(64)) for _ in range(50)])

    alone = [masks(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(masks, range(4)))
    assert all(map(torch.equal, alone, together))


def test_training_without_a_generator_is_refused_with_what_to_call() -> None:
    with pytest.raises(TrainingError, match=r"replace_dropout\(model, generator\)"):
        Dropout(0.5)(torch.ones(3))


def test_probability_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got 1.5"):
        Dropout(1.5)


def test_every_dropout_of_a_model_is_replaced_and_shares_the_generator() -> None:
    shared = nn.Dropout(0.1)
    model = nn.Sequential(
        shared, nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3).eval()), shared
    )
    generator = torch.Generator()
    replace_dropout(model, generator)
    layers = [model.get_submodule(name) for name in ("0", "1.1", "2")]
    assert all(isinstance(layer, Dropout) for layer in layers)
    assert [layer.p for layer in layers] == [0.1, 0.3, 0.1]
    assert [layer.training for layer in layers] == [True, False, True]
    assert [layer.generator for layer in layers] == [generator] * 3


def test_replacing_again_gives_the_copy_its_own_generator() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    first, second = torch.Generator(), torch.Generator()
    replace_dropout(model, first)
    duplicate = copy.deepcopy(model)
    replace_dropout(duplicate, second)
    assert [model[0].generator, duplicate[0].generator] == [first, second]


@pytest.mark.parametrize(
    "layer", [nn.AlphaDropout(0.1), nn.LSTM(2, 2, num_layers=2, dropout=0.1)]
)
def test_dropout_from_the_global_generator_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"layer '0' is a {type(layer).__name__}"):
        replace_dropout(nn.Sequential(layer), torch.Generator())


@pytest.mark.parametrize(
    ("layer", "setting"),
    [
        (nn.TransformerEncoderLayer(4, 1), "model.0.self_attn.dropout"),
        (nn.AlphaDropout(0.1), "model.0.p"),
    ],
    ids=["attention", "alpha"],
)
def test_what_is_refused_is_named_with_the_setting_to_change(
    layer: nn.Module, setting: str
) -> None:
    with pytest.raises(ValueError, match=rf"set {setting} = 0\.0 and use nn\.Dropout"):
        replace_dropout(nn.Sequential(layer), torch.Generator())


def test_global_dropout_that_drops_nothing_is_left_alone() -> None:
    model = nn.Sequential(nn.AlphaDropout(0.0), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1))
    replace_dropout(model, torch.Generator())
    assert isinstance(model[0], nn.AlphaDropout)
