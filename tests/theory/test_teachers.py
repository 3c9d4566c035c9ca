"""Teachers of stages against their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.stage_runs import Trained, arguments, batch_of, part
from tests.tiers import thorough
from torch import Tensor

from edgegossip.contract.randomness import generator
from edgegossip.training.optimizer import SGD
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.teachers import (
    Both,
    Greedy,
    LocalLosses,
    Shape,
    SyntheticGradients,
    similarities,
)


def seen(shape: Shape, num_samples: int = 12) -> tuple[Tensor, Tensor]:
    random = generator(0, "seen")
    x = torch.randn(num_samples, *shape, generator=random)
    return x, torch.arange(num_samples) % 3


@pytest.mark.parametrize("shape", [(16,), (4, 5, 5)], ids=str)
def test_a_synthetic_gradient_begins_at_zero_and_fits_a_fixed_target(shape: Shape) -> None:
    teacher = SyntheticGradients(lr=1e-2, width=32, channels=8).make(shape, 3, 0)
    x, y = seen(shape)
    outputs = x.clone().requires_grad_()
    teacher.teach(outputs, y).backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    assert not outputs.grad.any()
    by_class = torch.randn(3, *shape, generator=generator(0, "target"))
    gradient = by_class[y] / len(y)
    cosines = [teacher.fit(x, y, gradient) for _ in range(60)]
    assert cosines[0] == 0.0
    assert cosines[-1] is not None
    assert cosines[-1] > 0.95
    outputs = x.clone().requires_grad_()
    teacher.teach(outputs, y).backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    torch.testing.assert_close(outputs.grad, gradient, atol=0.05, rtol=0.3)


def test_what_it_learns_does_not_depend_on_the_size_of_a_batch() -> None:
    settings = SyntheticGradients(num_hidden=0)
    one, other = settings.make((16,), 3, 0), settings.make((16,), 3, 0)
    x, y = seen((16,))
    per_sample = torch.randn(12, 16, generator=generator(0, "target"))
    for _ in range(5):
        one.fit(x, y, per_sample / 12)
        other.fit(x.repeat(3, 1), y.repeat(3), per_sample.repeat(3, 1) / 36)
    for name, tensor in one.module.state_dict().items():
        torch.testing.assert_close(other.module.state_dict()[name], tensor)


@pytest.mark.parametrize("factor", [2.0**-20, 2.0**10])
def test_small_gradients_are_learned_as_well_as_large_ones(factor: float) -> None:
    x, y = seen((16,))
    gradient = torch.randn(12, 16, generator=generator(0, "target"))
    found = []
    for each in (1.0, factor):
        teacher = SyntheticGradients(width=32).make((16,), 3, 0)
        cosines = [teacher.fit(x, y, each * gradient) for _ in range(5)]
        outputs = x.clone().requires_grad_()
        teacher.teach(outputs, y).backward()  # type: ignore[no-untyped-call]
        assert outputs.grad is not None
        found.append((cosines, outputs.grad / each))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1])


def test_without_labels_it_sees_activations_alone() -> None:
    teacher = SyntheticGradients(num_hidden=0, is_conditioned=False).make((16,), 3, 0)
    assert [tuple(p.shape) for p in teacher.module.parameters()] == [(16, 16), (16,)]


@pytest.mark.parametrize("shape", [(16,), (4, 5, 5)], ids=str)
def test_a_local_loss_is_that_of_nokland_and_eidnes(shape: Shape) -> None:
    beta, n = 0.7, 12
    teacher = LocalLosses(similarity=beta).make(shape, 3, 0)
    parts: Any = teacher.module
    h, y = seen(shape)
    features = parts["similarity"](h).flatten(2) if len(shape) == 3 else parts["similarity"](h)
    rows = [each.std(-1) if len(shape) == 3 else each for each in features]
    wanted = [F.one_hot(label, 3).float() for label in y]
    total = 0.0
    for i in range(n):
        for j in range(n):
            found, target = (
                float(
                    F.cosine_similarity(a[i] - a[i].mean(), a[j] - a[j].mean(), dim=0).detach()
                )
                for a in (rows, wanted)
            )
            total += (found - target) ** 2
    predicted = parts["prediction"](h.flatten(1))
    expected = (1 - beta) * F.cross_entropy(predicted, y).item() + beta * total / n**2
    assert teacher.teach(h, y).item() == pytest.approx(expected, rel=1e-4)


def test_similarities_are_those_of_deviations_from_each_samples_mean() -> None:
    x, _ = seen((6,))
    found = similarities(x)
    torch.testing.assert_close(found, torch.corrcoef(x))
    assert torch.equal(similarities(x[..., None, None]), found)  # pictures of one point


@pytest.mark.parametrize("shape", [(16,), (4, 5, 5), (4, 1, 1)], ids=str)
def test_a_greedy_stage_is_trained_by_its_classifiers_loss(shape: Shape) -> None:
    teacher = Greedy(lr=1e-2).make(shape, 3, 0)
    h, y = seen(shape)
    losses = []
    for _ in range(60):
        outputs = h.clone().requires_grad_()
        loss = teacher.teach(outputs, y)
        assert loss.item() == pytest.approx(F.cross_entropy(teacher.module(h), y).item())
        loss.backward()  # type: ignore[no-untyped-call]
        assert outputs.grad is not None
        assert outputs.grad.any()
        teacher.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(3), abs=0.3)
    assert losses[-1] < losses[0] / 2


def test_both_is_the_sum_of_its_parts() -> None:
    parts = SyntheticGradients(width=8), LocalLosses()
    both = Both(gradients=parts[0], losses=parts[1], weight=0.25).make((16,), 3, 0)
    gradient, loss = both._gradient, both._loss  # type: ignore[attr-defined]
    h, y = seen((16,))
    for _ in range(10):
        both.fit(h, y, h / 12)

    def slope(teach: Any) -> Tensor:  # noqa: ANN401
        outputs = h.clone().requires_grad_()
        teach(outputs, y).backward()
        assert outputs.grad is not None
        return outputs.grad

    expected = slope(gradient.teach) + 0.25 * slope(loss.teach)
    torch.testing.assert_close(slope(both.teach), expected)
    assert slope(gradient.teach).any()
    before = [p.clone() for p in loss.module.parameters()]
    both.step()
    assert not torch.equal(next(loss.module.parameters()), before[0])


@thorough
def test_a_lesson_of_ones_own_batch_is_what_a_stage_learns_by() -> None:
    """The stage above stands still: the predicted gradient comes to be the true one."""
    teacher = SyntheticGradients(lr=1e-2, width=32)
    stage = Trained(
        DecoupledStage(teacher=teacher, **arguments(1, optimizer=SGD(lr=1e-9, momentum=0.0)))
    )
    above, inputs = part(2), batch_of(1)
    lesson: dict[str, Tensor] = {}
    cosine = 0.0
    for _ in range(80):
        result = stage.train({**inputs, **lesson})
        cosine = result.metrics.get("gradient_cosine", 0.0)
        h = result.outputs["activations"].clone().requires_grad_()
        F.cross_entropy(above(h), inputs["labels"]).backward()  # type: ignore[no-untyped-call]
        assert h.grad is not None
        lesson = {
            "fit_activations": h.detach(),
            "fit_labels": inputs["labels"],
            "fit_gradient": h.grad,
        }
    assert cosine > 0.95
