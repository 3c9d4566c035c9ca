"""Muon and AdamW as values: what updates what, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgegossip.contract.randomness import generator
from edgegossip.training.optimizer import AdamW, Muon

needs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="PyTorch has Muon from 2.9 on"
)


def parameters() -> list[nn.Parameter]:
    """Two matrices, a vector, a scalar and a kernel, each with a gradient."""
    draws = generator(0, "muon")
    made = []
    for shape in ((8, 8), (6, 24), (5,), (), (3, 2, 2, 2)):
        made.append(nn.Parameter(torch.randn(shape, generator=draws)))
        made[-1].grad = torch.randn(shape, generator=draws)
    return made


def stepped(
    optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter], num_steps: int = 3
) -> list[Tensor]:
    for _ in range(num_steps):
        optimizer.step()
    return [each.detach().clone() for each in params]


@needs_muon
def test_matrices_move_as_with_pytorchs_muon_and_all_else_as_with_adamw() -> None:
    params = parameters()
    found = stepped(Muon(lr=0.01, weight_decay=0.3)(params), params)
    params = parameters()
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.3}
    muon = torch.optim.Muon(
        params[:2], momentum=0.95, adjust_lr_fn="match_rms_adamw", **settings
    )
    matrices = stepped(muon, params[:2])
    others = stepped(AdamW(betas=(0.9, 0.95), **settings)(params[2:]), params[2:])
    for one, other in zip(found, [*matrices, *others], strict=True):
        assert torch.equal(one, other)


@needs_muon
def test_a_matrix_moves_by_nearly_orthogonal_steps_as_long_as_those_of_adamw() -> None:
    params = parameters()
    before = params[1].detach().clone()
    [_, after, *_] = stepped(Muon(lr=0.01, weight_decay=0.0)(params), params, num_steps=1)
    change = after - before
    scale = 0.01 * 0.2 * math.sqrt(24)
    singular = torch.linalg.svdvals(change) / scale
    # Five Newton-Schulz iterations bring all singular values into this band, not to 1.
    assert 0.5 < float(singular.min()) <= float(singular.max()) < 1.3
    assert float(change.square().mean().sqrt()) == pytest.approx(0.2 * 0.01, rel=0.3)


@needs_muon
@pytest.mark.parametrize("part", [slice(0, 2), slice(2, None)])
def test_a_model_may_have_only_matrices_or_none(part: slice) -> None:
    params = parameters()[part]
    before = [each.detach().clone() for each in params]
    after = stepped(Muon()(params), params)
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@needs_muon
def test_rates_and_state_are_those_of_the_whole() -> None:
    params = parameters()
    optimizer = Muon(lr=0.01)(params)
    optimizer.step()
    assert {*optimizer.state} == {*params}
    assert [{*optimizer.state[each]} for each in params[:2]] == [{"momentum_buffer"}] * 2
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    before = [each.detach().clone() for each in params]
    for one, other in zip(before, stepped(optimizer, params), strict=True):
        assert torch.equal(one, other)
    optimizer.state.clear()
    optimizer.step()
    assert float(optimizer.state[params[2]]["step"]) == 1


def test_an_old_pytorch_has_no_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match=r"Muon needs PyTorch 2.9 or later, got .* AdamW"):
        Muon()(parameters())


def test_adamw_is_pytorchs() -> None:
    params = parameters()
    found = stepped(AdamW(lr=0.02, weight_decay=0.1)(params), params)
    params = parameters()
    expected = stepped(torch.optim.AdamW(params, lr=0.02, weight_decay=0.1), params)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (AdamW, {"lr": -1.0}, r"lr must be in \[0, inf\), got -1.0"),
        (AdamW, {"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), got 1.0"),
        (Muon, {"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        (Muon, {"betas": (-0.1, 0.9)}, r"betas must be in \[0, 1\), got -0.1"),
        (Muon, {"weight_decay": -0.1}, r"weight_decay must be in \[0, inf\), got -0.1"),
    ],
)
def test_bad_arguments_are_refused(
    make: type[AdamW | Muon], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**arguments)
