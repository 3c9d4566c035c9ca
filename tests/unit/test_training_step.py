"""Mixed precision, accumulation, clipping, compilation: the same gradients by other ways."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.small_runs import small_task
from tests.small_tasks import experiment, regression
from torch import Tensor, nn

from edgegossip.contract.protocol import Epochs, Role, Steps, Train
from edgegossip.data.dataset import from_tensors
from edgegossip.runs.describe import describe
from edgegossip.runs.runner import run
from edgegossip.training.learner import Learner
from edgegossip.training.loss import TokenCrossEntropy, next_token
from edgegossip.training.metrics import BitsPerCharacter
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import Importance
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.stages.pipelined import PipelinedStage
from edgegossip.training.stages.staged import staged
from edgegossip.training.step import TrainingStep
from edgegossip.training.task import Workload

NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler",
)


def learner(step: TrainingStep, **changes: Any) -> Learner:  # noqa: ANN401
    trainer = Workload(regression(step=step, **changes), [0], 0).make_trainer(0)
    assert isinstance(trainer, Learner)
    return trainer


def trained(step: TrainingStep, num_steps: int = 6, **changes: Any) -> tuple[Tensor, float]:  # noqa: ANN401
    """The parameters and the loss after some steps of 32 samples."""
    some = learner(step, **{"batch_size": 32} | changes)
    result = some.train(Train(some.model.params.clone(), Steps(num_steps)))
    return result.params, result.loss


@pytest.mark.parametrize("size", [1, 5, 8, 31])
def test_accumulated_micro_batches_do_what_one_batch_does(size: int) -> None:
    whole, loss = trained(TrainingStep())
    params, mean = trained(TrainingStep(micro_batch_size=size))
    torch.testing.assert_close(params, whole, rtol=1e-5, atol=1e-6)
    assert mean == pytest.approx(loss, rel=1e-5)
    assert not torch.equal(params, trained(TrainingStep(), num_steps=5)[0])


def test_a_batch_that_fits_a_micro_batch_is_trained_as_without() -> None:
    assert torch.equal(
        trained(TrainingStep(micro_batch_size=32))[0], trained(TrainingStep())[0]
    )


class Widest(nn.Module):
    """Records how many samples it gets at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        y: Tensor = self.layer(x)
        return y


def test_no_pass_has_more_samples_than_a_micro_batch() -> None:
    some = learner(TrainingStep(micro_batch_size=12), model=Widest, batch_size=32)
    some.train(Train(some.model.params.clone(), Epochs()))
    assert some.model.module.seen == [12, 12, 8] * 2


def padded_tokens(micro_batch_size: int | None) -> tuple[Tensor, float]:
    """Train a step on sequences of which some are mostly padding, some nothing else."""
    tokens = torch.randint(0, 9, (8, 6), generator=torch.Generator().manual_seed(0))
    tokens[2:5, 2:], tokens[6:] = -1, -1

    def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs, targets = next_token(model, batch.clamp(min=0))
        return outputs, targets.where(batch[:, 1:] >= 0, -100)

    return trained(
        TrainingStep(micro_batch_size=micro_batch_size),
        num_steps=1,
        dataset=from_tensors("padded", train=tokens, test=tokens),
        model=lambda: nn.Sequential(nn.Embedding(9, 9)),
        forward=forward,
        loss=TokenCrossEntropy(),
        metrics=(BitsPerCharacter(),),
        batch_size=8,
    )


def test_micro_batches_count_by_their_tokens_where_the_loss_says_so() -> None:
    whole, loss = padded_tokens(None)
    for size in (2, 3):
        params, mean = padded_tokens(size)
        torch.testing.assert_close(params, whole, rtol=1e-5, atol=1e-6)
        assert mean == pytest.approx(loss, rel=1e-5)


def test_weighed_samples_are_accumulated_with_their_weights() -> None:
    changes: dict[str, Any] = {
        "dataset": small_task().dataset,
        "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
        "loss": F.cross_entropy,
        "metrics": small_task().metrics,
        "accuracy_aware": AccuracyAware(selection=Importance()),
    }
    whole, _ = trained(TrainingStep(), **changes)
    params, _ = trained(TrainingStep(micro_batch_size=5), **changes)
    torch.testing.assert_close(params, whole, rtol=1e-4, atol=1e-5)


def test_clipping_bounds_the_norm_of_all_gradients_together() -> None:
    plain = SGD(lr=1.0, momentum=0.0)
    start, far, near = (
        learner(TrainingStep(max_grad_norm=norm), optimizer=plain) for norm in (None, 0.25, 1e6)
    )
    begin = start.model.params.clone()
    moves = [some.train(Train(begin, Steps(1))).params - begin for some in (start, far, near)]
    assert moves[0].norm() > 0.5
    assert moves[1].norm() == pytest.approx(0.25, rel=1e-4)
    torch.testing.assert_close(moves[1] / 0.25, moves[0] / moves[0].norm())
    assert torch.equal(moves[2], moves[0])


def test_clipping_is_of_the_accumulated_gradient() -> None:
    whole, _ = trained(TrainingStep(max_grad_norm=0.1))
    params, _ = trained(TrainingStep(max_grad_norm=0.1, micro_batch_size=8))
    torch.testing.assert_close(params, whole, rtol=1e-5, atol=1e-6)


def test_autocast_rounds_and_leaves_parameters_in_full_precision() -> None:
    kinds: list[torch.dtype] = []

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs: Tensor = model(batch[0])
        kinds.append(outputs.dtype)
        return outputs, batch[1]

    whole, loss = trained(TrainingStep(), forward=forward)
    assert {*kinds} == {torch.float32}
    kinds.clear()
    params, rounded = trained(TrainingStep(autocast=torch.bfloat16), forward=forward)
    assert {*kinds} == {torch.bfloat16}
    assert params.dtype == torch.float32
    assert not torch.equal(params, whole)
    torch.testing.assert_close(params, whole, rtol=0.02, atol=0.02)
    assert rounded == pytest.approx(loss, rel=0.02)


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.filterwarnings("default")  # of the compiler's own code
def test_a_compiled_model_learns_what_it_learns_otherwise() -> None:
    whole, loss = trained(TrainingStep())
    params, mean = trained(TrainingStep(compile=True))
    torch.testing.assert_close(params, whole, rtol=1e-4, atol=1e-5)
    assert mean == pytest.approx(loss, rel=1e-4)


@NEEDS_COMPILER
def test_compiling_is_what_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []

    def compiled(module: nn.Module) -> nn.Module:
        made.append(module)
        return nn.Sequential(module)

    monkeypatch.setattr(torch, "compile", compiled)
    some = learner(TrainingStep(compile=True))
    some.train(Train(some.model.params.clone(), Epochs()))
    assert made == [some.model.module], "once for a copy of the model"


def test_all_of_it_goes_into_a_run(tmp_path: Path) -> None:
    step = TrainingStep(autocast=torch.bfloat16, micro_batch_size=3, max_grad_norm=1.0)
    results = run(experiment(regression(step=step)), out=tmp_path)
    assert results.final_value < results.history[0].value
    assert describe(regression(step=step))["step"] == {
        "type": "TrainingStep",
        "autocast": "bfloat16",
        "micro_batch_size": 3,
        "max_grad_norm": 1.0,
        "compile": False,
        "cuda_graph": False,
    }
    assert "step" not in describe(regression()), "as in folders that were written before"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"autocast": torch.float16}, "got torch.float16; float16 would need its gradients"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1 or None, got 0"),
        ({"micro_batch_size": 1.5}, "micro_batch_size must be a whole number, got 1.5"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0 or None, got 0.0"),
    ],
)
def test_a_step_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingStep(**wrong)


def test_trainers_with_steps_of_their_own_refuse_settings_for_them() -> None:
    step = TrainingStep(micro_batch_size=2)
    stacked = Workload(regression(step=step, trainer=StackedLearner), [0], 0)
    with pytest.raises(ValueError, match="StackedLearner supports neither"):
        stacked.make_trainer(0)
    pictures = small_task(
        step=step, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Linear(8, 3))
    )
    cut = staged(pictures, at=[2], make_stage=partial(PipelinedStage, max_passed=1))
    workload = Workload(cut.task, [0], 0, role=lambda rank: Role(f"stage-{rank}"))
    with pytest.raises(ValueError, match="a stage computes its steps itself"):
        workload.make_trainer(0)
