"""Trainers of stages: what they learn from, remember, and give to others."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.stage_runs import Trained, arguments, batch_of, numbered, part, place
from torch import Tensor, nn

from edgegossip.contract.errors import LocalProtocolError, TrainingError
from edgegossip.contract.protocol import Epochs, Payload, Steps, Train
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import Ranked
from edgegossip.training.stages.decoupled import DecoupledStage
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.teachers import (
    Both,
    Greedy,
    LocalLosses,
    Shape,
    SyntheticGradients,
    Teacher,
    TeacherFactory,
)

TEACHERS: dict[str, TeacherFactory] = {
    "synthetic": SyntheticGradients(lr=3e-3, width=16, channels=4),
    "local": LocalLosses(),
    "prediction": LocalLosses(similarity=0.0),
    "similarity": LocalLosses(similarity=1.0),
    "greedy": Greedy(width=16),
    "both": Both(gradients=SyntheticGradients(width=16, channels=4)),
}
each_teacher = pytest.mark.parametrize("teacher", TEACHERS.values(), ids=TEACHERS)


def decoupled(number: int, teacher: TeacherFactory = LocalLosses(), **changes: Any) -> Trained:  # noqa: ANN401
    options = {"teacher": teacher, "replay": changes.pop("replay", 0)}
    return Trained(DecoupledStage(**options, **arguments(number, **changes)))


def pipelined(number: int, max_passed: int = 3, **changes: Any) -> Trained:  # noqa: ANN401
    return Trained(PipelinedStage(max_passed=max_passed, **arguments(number, **changes)))


# Decoupled.


@each_teacher
@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_gives_what_the_next_one_needs(teacher: TeacherFactory, number: int) -> None:
    stage = decoupled(number, teacher)
    given = stage.train(batch_of(number) if number else {}).outputs
    assert given["activations"].shape == (8, *place(number).shape)
    assert given["labels"].shape == (8,)
    assert not given["activations"].requires_grad
    assert ("gradient" in given) == (number > 0)


def test_only_the_first_stage_counts_samples() -> None:
    assert decoupled(0).train().num_samples == 8
    assert decoupled(1).train(batch_of(1)).num_samples == 0
    assert pipelined(0).train(numbered(0)).num_samples == 8


def test_the_last_stage_has_the_true_loss_and_gives_its_gradient() -> None:
    stage, inputs = decoupled(2), batch_of(2)
    result = stage.train(inputs)
    x = inputs["activations"].clone().requires_grad_()
    loss = F.cross_entropy(part(2)(x), inputs["labels"])
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert result.loss == pytest.approx(loss.item())
    assert [*result.outputs] == ["gradient"]
    torch.testing.assert_close(result.outputs["gradient"], x.grad)


def test_a_stage_whose_teacher_has_no_loss_says_zero() -> None:
    for name in ("synthetic", "both"):
        assert decoupled(1, TEACHERS[name]).train(batch_of(1)).loss == 0.0
    assert decoupled(1, TEACHERS["local"]).train(batch_of(1)).loss > 0


def lesson(number: int, num_samples: int = 8) -> Payload:
    """A gradient that has come back to stage `number`."""
    given = batch_of(number + 1, num_samples)
    wanted = {"gradient": given["activations"] / num_samples}
    return {f"fit_{name}": tensor for name, tensor in {**given, **wanted}.items()}


def test_a_lesson_comes_before_the_batch_and_says_how_close_it_was() -> None:
    stage = decoupled(1, TEACHERS["synthetic"])
    cosines = [
        stage.train({**batch_of(1), **lesson(1)}).metrics["gradient_cosine"] for _ in range(60)
    ]
    assert cosines[0] == 0.0  # it predicts nothing yet
    assert cosines[-1] > 0.9
    assert stage.train(batch_of(1)).metrics == {}


def test_an_untaught_synthetic_gradient_leaves_a_stage_where_it_is() -> None:
    stage = decoupled(1, TEACHERS["synthetic"], has_buffers=False)
    before = stage.params.clone()
    result = stage.train(batch_of(1))
    assert torch.equal(stage.params, before)
    assert not result.outputs["gradient"].any()


@each_teacher
def test_a_batch_of_one_sample_can_be_learned_from(teacher: TeacherFactory) -> None:
    stage = decoupled(0, teacher, batch_size=1)
    stage.train(lesson(0, num_samples=1) if teacher.learns_from_gradients else {})
    assert stage.params.isfinite().all()


def test_replayed_batches_are_those_kept_and_only_new_ones_have_a_gradient() -> None:
    stage = decoupled(2, replay=3)
    found = [stage.train(batch_of(2, seed=seed)).outputs for seed in range(30)]
    num_new = sum("gradient" in outputs for outputs in found)
    assert 3 <= num_new <= 20
    assert len(stage.trainer.state_dict()["kept"]) == 3
    with pytest.raises(ValueError, match="replay must be at least 0"):
        decoupled(2, replay=-1)


@each_teacher
@pytest.mark.parametrize("number", [0, 1])
def test_a_decoupled_stage_goes_on_from_a_checkpoint_to_the_same_bits(
    teacher: TeacherFactory, number: int
) -> None:
    optimizer = SGD(lr=0.1, momentum=0.9)
    whole, half = (decoupled(number, teacher, optimizer=optimizer, replay=2) for _ in range(2))
    results = []
    for step in range(6):
        inputs = {**(batch_of(number, seed=step) if number else {}), **lesson(number)}
        results.append(whole.train(inputs))
        if step < 3:
            half.train(inputs)
    rest = decoupled(number, teacher, optimizer=optimizer, replay=2)
    rest.trainer.load_state_dict(assemble(*dismantle(half.trainer.state_dict())))
    rest.params = half.params
    for step in range(3, 6):
        inputs = {**(batch_of(number, seed=step) if number else {}), **lesson(number)}
        result = rest.train(inputs)
        for name, tensor in results[step].outputs.items():
            assert torch.equal(result.outputs[name], tensor)
    assert torch.equal(rest.params, whole.params)


def test_starting_over_forgets_a_teacher_that_is_no_longer_sound() -> None:
    stage = decoupled(1, TEACHERS["greedy"])
    teacher = stage.trainer._teacher  # type: ignore[union-attr]
    stage.trainer.start_over()
    assert stage.trainer._teacher is teacher  # type: ignore[union-attr]
    assert teacher is not None
    with torch.no_grad():
        next(teacher.module.parameters()).fill_(math.nan)
    stage.trainer.start_over()
    assert stage.train(batch_of(1)).params.isfinite().all()


# Pipelined.


def test_a_forward_pass_moves_running_statistics_and_nothing_else() -> None:
    stage = pipelined(0)
    before = stage.params.clone()
    stage.train(numbered(0))
    num_trained = stage.trainer.layout.num_trained
    assert torch.equal(stage.params[:num_trained], before[:num_trained])
    assert not torch.equal(stage.params[num_trained:], before[num_trained:])


def test_a_gradient_is_that_of_the_weights_of_its_forward_pass() -> None:
    """Two batches in flight: the second was seen with weights that have changed since."""
    stage = pipelined(1)
    first, second = batch_of(1, seed=1), batch_of(1, seed=2)
    wanted = [torch.randn(8, 16, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    stage.train(numbered(0, **first))
    stage.train(numbered(1, 0, **second))
    num_trained = stage.trainer.layout.num_trained
    start, expected = stage.params.clone(), stage.params[:num_trained].clone()
    for number, (inputs, gradient) in enumerate(zip((first, second), wanted, strict=True)):
        module = copy.deepcopy(part(1))  # always with the weights of the start
        x = inputs["activations"].clone().requires_grad_()
        module(x).backward(gradient)
        expected -= 0.1 * flat_gradient(module)
        result = stage.train({"batch": torch.tensor(number), "gradient": gradient})
        assert x.grad is not None
        torch.testing.assert_close(result.outputs["gradient"], x.grad)
        torch.testing.assert_close(stage.params[:num_trained], expected)
    assert torch.equal(stage.params[num_trained:], start[num_trained:])


def flat_gradient(module: nn.Module) -> Tensor:
    """In the order of a flat vector: convolutions are laid out channels last."""
    found = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        is_convolution = parameter.ndim == 4
        grad = parameter.grad.permute(0, 2, 3, 1) if is_convolution else parameter.grad
        found.append(grad.flatten())
    return torch.cat(found)


@pytest.mark.parametrize("has_buffers", [True, False])
@pytest.mark.parametrize("number", [0, 1])
def test_a_pipelined_stage_goes_on_from_a_checkpoint_with_batches_in_flight(
    number: int, has_buffers: bool
) -> None:
    settings: dict[str, Any] = {
        "optimizer": SGD(lr=0.1, momentum=0.9),
        "has_buffers": has_buffers,
    }
    whole, half = pipelined(number, **settings), pipelined(number, **settings)
    for stage in (whole, half):
        for k in range(2):
            stage.train(numbered(k, *range(k), **(batch_of(number, seed=k) if number else {})))
    rest = pipelined(number, **settings)
    rest.trainer.load_state_dict(assemble(*dismantle(half.trainer.state_dict())))
    rest.params = half.params
    shape = place(number).shape
    for k in (0, 1):
        back = {"batch": torch.tensor(k), "gradient": torch.full((8, *shape), 0.1 * (k + 1))}
        one, other = whole.train(back), rest.train(back)
        assert torch.equal(one.params, other.params)
        if number:
            assert torch.equal(one.outputs["gradient"], other.outputs["gradient"])
    forward = numbered(9, **(batch_of(number, seed=9) if number else {}))
    one, other = whole.train(forward), rest.train(forward)
    assert torch.equal(one.outputs["activations"], other.outputs["activations"])
    buffers = [dict(each.trainer.model.module.named_buffers()) for each in (whole, rest)]
    for name, buffer in buffers[0].items():
        assert torch.equal(buffers[1][name], buffer), name


def test_batches_that_no_longer_wait_are_forgotten_and_the_others_are_not() -> None:
    stage = pipelined(1, max_passed=2)
    stage.train(numbered(0, **batch_of(1)))
    stage.train(numbered(1, 0, **batch_of(1)))
    stage.train(numbered(2, 0, **batch_of(1)))  # 1 was given up
    gradient = torch.ones(8, 16)
    stage.train({"batch": torch.tensor(0), "gradient": gradient})
    with pytest.raises(LocalProtocolError, match=r"a gradient of batch 1, but remembers \[2\]"):
        stage.train({"batch": torch.tensor(1), "gradient": gradient})
    stage.train(numbered(3, 2, **batch_of(1)))
    with pytest.raises(LocalProtocolError, match=r"has 3 batches .* max_passed is 2"):
        stage.train(numbered(4, 2, 3, **batch_of(1)))
    stage.trainer.start_over()
    assert stage.trainer.state_dict()["passed"] == {}


# What does not fit.


@pytest.mark.parametrize("make", [decoupled, pipelined])
def test_a_stage_above_the_first_needs_a_batch(make: Any) -> None:  # noqa: ANN401
    with pytest.raises(LocalProtocolError, match="worker 0 holds stage 1, which trains on"):
        make(1).train(numbered(0))
    with pytest.raises(LocalProtocolError, match="a PipelinedStage is for Pipelined"):
        pipelined(0).train()


@pytest.mark.parametrize("make", [decoupled, pipelined])
def test_inputs_that_a_stage_cannot_take_are_no_end_of_a_worker(make: Any) -> None:  # noqa: ANN401
    inputs = {**batch_of(1), "activations": torch.zeros(8, 5)}
    with pytest.raises(TrainingError, match="stage 1 on worker 0 cannot take its inputs"):
        make(1).train(numbered(0, **inputs))
    inputs = {**batch_of(1), "activations": torch.full((8, 4, 4, 4), math.inf)}
    with pytest.raises(TrainingError, match="gives activations that are not finite"):
        make(1).train(numbered(0, **inputs))


@pytest.mark.parametrize("make", [decoupled, pipelined])
def test_the_true_loss_is_to_be_finite_before_anything_is_learned(make: Any) -> None:  # noqa: ANN401
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum() * math.nan

    stage = make(2, loss=loss)
    with pytest.raises(TrainingError, match="became nan in its step 1"):
        stage.train(numbered(0, **batch_of(2)))
    assert stage.trainer.model.params.isfinite().all()


def test_samples_cannot_be_chosen_by_losses_that_are_not_known() -> None:
    accuracy_aware = AccuracyAware(selection=Ranked())
    with pytest.raises(ValueError, match="Ranked chooses samples by their losses"):
        decoupled(0, accuracy_aware=accuracy_aware)


# What it costs, in samples of the whole model.


def test_a_stage_costs_its_share_and_a_pass_as_much_as_its_batches() -> None:
    stage = pipelined(0).trainer
    assert stage.epoch_cost == pytest.approx(24 / 3)
    forward = stage.cost(Train(torch.empty(0), Steps(1), inputs=numbered(0)))
    inputs = {"batch": torch.tensor(0), "gradient": torch.zeros(8, 4, 4, 4)}
    backward = stage.cost(Train(torch.empty(0), Steps(1), inputs=inputs))
    assert forward == pytest.approx(8 / 9)
    assert backward == pytest.approx(16 / 9)
    last = Train(torch.empty(0), Steps(1), inputs=numbered(0, **batch_of(2)))
    assert pipelined(2).trainer.cost(last) == pytest.approx(8 / 3)
    first = Train(torch.empty(0), Epochs(1e-12))
    assert decoupled(0).trainer.cost(first) == pytest.approx(8 / 3)


# Teachers.


class Fixed(TeacherFactory):
    """Teaches nothing."""

    def build(self, shape: Shape, num_classes: int) -> Teacher:
        return Nothing(nn.Linear(1, 1), 0.1)


class Nothing(Teacher):
    def teach(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return 0.0 * outputs.sum()


def test_a_teacher_of_ones_own_will_do_and_learns_from_no_gradient() -> None:
    stage = decoupled(1, Fixed(), has_buffers=False)
    before = stage.params.clone()
    stage.train({**batch_of(1), **lesson(1)})
    assert torch.equal(stage.params, before)
    assert not Fixed.learns_from_gradients


def test_teachers_of_one_worker_are_always_the_same_and_no_generator_is_moved() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other = (Greedy().make((16,), 3, 0, 1, 0) for _ in range(2))
    third = Greedy().make((16,), 3, 0, 2, 0)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [next(each.module.parameters()) for each in (one, other, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


BAD: list[tuple[type[TeacherFactory], dict[str, Any], str]] = [
    (SyntheticGradients, {"lr": 0.0}, "lr must be above 0"),
    (SyntheticGradients, {"num_hidden": -1}, "num_hidden must be at least 0"),
    (LocalLosses, {"similarity": 1.5}, r"similarity must be in \[0, 1\]"),
    (Greedy, {"width": 0}, "width must be at least 1"),
    (Both, {"weight": -1.0}, r"weight must be in \[0, inf\)"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), BAD)
def test_a_teacher_that_cannot_be_is_refused(
    kind: type[TeacherFactory], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**changes)


# Pictures are laid out as kernels like them best, and so rounded, wherever they come from.


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_how_a_message_lays_out_its_pictures_changes_no_bit(
    layout: torch.memory_format,
) -> None:
    stages = [decoupled(0, TEACHERS["synthetic"]), pipelined(0)]
    gradient = torch.randn(8, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    seen: list[torch.Tensor] = []
    for laid_out in (torch.contiguous_format, layout):
        stages = [decoupled(0, TEACHERS["synthetic"]), pipelined(0)]
        given = {
            n: x.contiguous(memory_format=laid_out) if x.ndim == 4 else x
            for n, x in lesson(0).items()
        }
        stages[0].train(given)
        stages[0].train(given)
        stages[1].train(numbered(0))
        back = gradient.contiguous(memory_format=laid_out)
        stages[1].train({"batch": torch.tensor(0), "gradient": back})
        seen += [each.params for each in stages]
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
