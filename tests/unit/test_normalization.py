"""EvoNorm-S0 is the formula of its paper; who normalises by batches is warned of skew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.small_runs import small_model, small_task
from torch import Tensor, nn

from edgegossip.data.partition import IID, BySubject, Dirichlet, LabelSkew, Partition, is_skewed
from edgegossip.models.normalization import EvoNormS0, normalization_2d
from edgegossip.training.task import Workload


def picture_batch(num_channels: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, num_channels, 4, 5, generator=generator, dtype=torch.float64) + 0.3


def with_random_parameters(num_channels: int) -> EvoNormS0:
    layer = EvoNormS0(num_channels).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    return layer


def test_evonorm_is_the_formula_of_its_paper_written_out() -> None:
    x, layer = picture_batch(), with_random_parameters(16)
    v, gamma, beta = (p.flatten() for p in (layer.v, layer.gamma, layer.beta))
    y = layer(x)
    for sample in range(3):
        for channel in range(16):
            first = channel // 2 * 2  # 8 groups of 2 channels
            group = x[sample, first : first + 2]
            std = (group.square().mean() - group.mean().square() + 1e-5).sqrt()
            own = x[sample, channel]
            numerator = own / (1 + torch.exp(-v[channel] * own))
            expected = numerator / std * gamma[channel] + beta[channel]
            torch.testing.assert_close(y[sample, channel], expected)


def test_evonorm_of_a_sample_does_not_depend_on_the_batch() -> None:
    x, layer = picture_batch(), with_random_parameters(16)
    torch.testing.assert_close(layer(x)[1:2], layer(x[1:2]))


def test_evonorm_with_large_v_is_a_rectified_group_normalisation() -> None:
    # sigmoid(v x) tends to the step function, so that x sigmoid(v x) tends to max(x, 0).
    x, layer = picture_batch(), EvoNormS0(16).double()
    layer.v.data.fill_(1e6)
    std = x.view(3, 8, -1).var(2, correction=0).add(1e-5).sqrt().repeat_interleave(2, 1)
    torch.testing.assert_close(layer(x), x.relu() / std[..., None, None])


def test_gradient_of_evonorm_is_that_of_finite_differences() -> None:
    layer = with_random_parameters(4)
    x = picture_batch(4)[:2, :, :2, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))


@pytest.mark.parametrize("kind", ["batch", "group", "evonorm"])
def test_normalisation_takes_scale_off_its_input(kind: str) -> None:
    x = picture_batch().float()
    layer = normalization_2d(kind, 16)  # type: ignore[arg-type]
    torch.testing.assert_close(layer(100 * x).std(), layer(x).std(), rtol=0.35, atol=0)


def test_evonorm_keeps_the_channels_last_layout() -> None:
    x = picture_batch().contiguous(memory_format=torch.channels_last)
    layer = with_random_parameters(16)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x), layer(x.contiguous()))


def workload(**changes: Any) -> Workload:  # noqa: ANN401
    settings: dict[str, Any] = {"model": small_model, "partition": LabelSkew(0.8)}
    return Workload(small_task(**settings | changes), range(4), seed=0)


@pytest.mark.parametrize(
    ("has_buffers", "then"),
    [
        (True, "exchanged and averaged with the parameters"),
        (False, "not exchanged, but measured"),
    ],
)
def test_running_statistics_under_skew_are_warned_of(has_buffers: bool, then: str) -> None:
    with pytest.warns(UserWarning, match=rf"1 layers \(BatchNorm2d\).*{then}"):
        workload(has_buffers=has_buffers)


@pytest.mark.parametrize(
    "changes",
    [
        {"partition": IID()},
        {"partition": LabelSkew(0.0)},
        {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3))},
        {"model": lambda: nn.Sequential(EvoNormS0(1), nn.Flatten(), nn.Linear(36, 3))},
    ],
)
def test_nothing_is_warned_of_where_all_see_the_same_or_there_are_none(
    changes: dict[str, Any],
) -> None:
    workload(**changes)  # a warning is an error in tests


def test_buffers_that_may_be_constants_are_warned_of() -> None:
    def encoded(persistent: bool) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, 3))
        model[2].register_buffer("positions", torch.ones(3), persistent=persistent)
        return model

    with pytest.warns(
        UserWarning, match=r"buffers \['2.positions'\] are exchanged.*persistent"
    ):
        workload(model=lambda: encoded(persistent=True), partition=IID())
    workload(model=lambda: encoded(persistent=False), partition=IID())
    workload(model=lambda: encoded(persistent=True), partition=IID(), has_buffers=False)
    alone = small_task(model=lambda: encoded(persistent=True))
    Workload(alone, range(1), seed=0)


@pytest.mark.parametrize("partition", [Dirichlet(0.1), LabelSkew(0.5), BySubject()])
def test_partitions_that_deal_unevenly_say_so(partition: Partition) -> None:
    assert is_skewed(partition)
