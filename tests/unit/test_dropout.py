"""Dropout is PyTorch's, but for where its masks come from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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


X = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))


def encoder(p: float) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=p, batch_first=True)


def packed() -> Any:  # noqa: ANN401
    return nn.utils.rnn.pack_padded_sequence(X, torch.tensor([5, 4, 1]))


def attention(p: float, **options: Any) -> nn.Module:  # noqa: ANN401
    return nn.MultiheadAttention(4, 2, dropout=p, **options)


def recurrent(kind: Callable[..., nn.Module], p: float, **options: Any) -> nn.Module:  # noqa: ANN401
    return kind(4, 6, 3, dropout=p, **options)


SELF = (X, X, X)
CAUSAL = {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True}
INNER: dict[str, tuple[Callable[..., nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "lstm": (partial(recurrent, nn.LSTM), (X,), {}),
    "lstm of a state": (
        partial(recurrent, nn.LSTM),
        (X, (torch.ones(3, 3, 6), torch.ones(3, 3, 6))),
        {},
    ),
    "gru": (partial(recurrent, nn.GRU, batch_first=True, bias=False), (X,), {}),
    "gru of one sample": (partial(recurrent, nn.GRU), (X[:, 0],), {}),
    "rnn": (partial(recurrent, nn.RNN, nonlinearity="relu", bidirectional=True), (X,), {}),
    "packed": (partial(recurrent, nn.LSTM, bidirectional=True), (packed(),), {}),
    "attention": (attention, SELF, {}),
    "batch first": (partial(attention, batch_first=True), SELF, {"need_weights": False}),
    "each head": (attention, (X[:2], X, X), {"average_attn_weights": False}),
    "causal": (attention, SELF, CAUSAL),
    "one sample": (partial(attention, add_bias_kv=True), (X[0], X[0], X[0]), {}),
    "keys of their own": (
        partial(attention, kdim=4, vdim=4, bias=False, add_zero_attn=True),
        SELF,
        {"key_padding_mask": torch.arange(5).expand(3, 5) > 3},
    ),
    "encoder": (encoder, (X,), {}),
}


def tensors(outputs: object) -> list[Tensor]:
    return [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]


def replaced(make: Callable[..., nn.Module], p: float) -> tuple[nn.Module, nn.Module]:
    """A layer of PyTorch, and the same with masks of our own."""
    torch.manual_seed(0)
    theirs = make(p)
    ours = copy.deepcopy(theirs)
    replace_dropout(ours, torch.Generator().manual_seed(0))
    return theirs, ours


def without_dropout(layer: nn.Module) -> None:
    for each in layer.modules():
        if isinstance(each, Dropout):
            each.p = 0.0


@pytest.mark.parametrize("name", INNER)
def test_dropout_within_a_layer_draws_from_the_generator_only(name: str) -> None:
    make, inputs, options = INNER[name]
    _, ours = replaced(make, 0.5)
    _, again = replaced(make, 0.5)
    before = torch.random.get_rng_state()
    first, second = (tensors(layer(*inputs, **options)) for layer in (ours, again))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(tensors(ours(*inputs, **options))[0], first[0])


@pytest.mark.parametrize("name", INNER)
def test_but_for_its_masks_such_a_layer_is_pytorchs(name: str) -> None:
    make, inputs, options = INNER[name]
    theirs, ours = replaced(make, 0.5)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert isinstance(ours, type(theirs))
    for layer in (theirs.eval(), ours.eval()):
        layer.zero_grad()
    for mine, wanted in zip(
        tensors(ours(*inputs, **options)), tensors(theirs(*inputs, **options)), strict=True
    ):
        assert torch.equal(mine, wanted)
    theirs, _ = replaced(make, 0.0)
    without_dropout(ours.train())
    for layer in (theirs, ours):
        loss = tensors(layer(*inputs, **options))[0].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(
        [each.grad for each in ours.parameters()], [each.grad for each in theirs.parameters()]
    )
    outputs = [tensors(layer(*inputs, **options)) for layer in (ours, theirs)]
    torch.testing.assert_close(*outputs)


def test_recurrent_dropout_lies_between_layers() -> None:
    layers = [nn.LSTM(4, 6), nn.LSTM(6, 6)]
    both = nn.LSTM(4, 6, 2, dropout=0.5)
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            both.get_parameter(name[:-1] + str(number)).data.copy_(parameter)
    replace_dropout(both, torch.Generator().manual_seed(0))
    between = dropout(0.5)(layers[0](X)[0])
    assert torch.equal(both(X)[0], layers[1](between)[0])


def test_attention_weights_are_kept_or_dropped() -> None:
    theirs, ours = replaced(partial(attention, batch_first=True), 0.2)
    x = torch.randn(50, 20, 4)
    _, whole = theirs.eval()(x, x, x, average_attn_weights=False)
    _, weights = ours(x, x, x, average_attn_weights=False)
    shares = weights / whole
    kept = shares != 0
    torch.testing.assert_close(shares[kept], torch.full_like(shares[kept], 1.25))
    # Standard deviation of the mean over 40,000 weights: 0.002.
    assert float(kept.float().mean()) == pytest.approx(0.8, abs=0.008)


@pytest.mark.parametrize("make", [encoder, partial(recurrent, nn.LSTM)])
def test_a_copy_of_such_a_layer_gets_its_own_generator(
    make: Callable[[float], nn.Module],
) -> None:
    _, ours = replaced(make, 0.5)
    duplicate = copy.deepcopy(ours)
    fresh = torch.Generator().manual_seed(1)
    replace_dropout(duplicate, fresh)
    sources = [each.generator for each in duplicate.modules() if isinstance(each, Dropout)]
    assert sources
    assert all(each is fresh for each in sources)


class Sharing(nn.Module):
    """A class of somebody's own, which hands the share to a function."""

    dropout = 0.1


@pytest.mark.parametrize(
    ("layer", "setting"),
    [(Sharing(), "model.0.dropout"), (nn.AlphaDropout(0.1), "model.0.p")],
    ids=["own class", "alpha"],
)
def test_what_is_refused_is_named_with_the_setting_to_change(
    layer: nn.Module, setting: str
) -> None:
    message = (
        rf"layer '0' is a {type(layer).__name__} .* set {setting} = 0\.0 and use nn\.Dropout"
    )
    with pytest.raises(ValueError, match=message):
        replace_dropout(nn.Sequential(layer), torch.Generator())


def test_global_dropout_that_drops_nothing_is_left_alone() -> None:
    model = nn.Sequential(nn.AlphaDropout(0.0), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1))
    replace_dropout(model, torch.Generator())
    assert [type(each) for each in model] == [nn.AlphaDropout, nn.LSTM, nn.MultiheadAttention]
