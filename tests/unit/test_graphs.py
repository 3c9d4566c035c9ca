"""Steps as graphs: the same training, on a stand-in for CUDA graphs that a CPU can repeat."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.dense_models import dense, dense_task, flat_data
from tests.networks import NETWORKS
from tests.small_learners import DATA, OPTIMIZERS, SHARD, learner, seeded
from tests.small_runs import small_task
from tests.tape import TapeRecorder
from tests.tiers import thorough
from torch import Tensor, nn

from edgegossip.contract.protocol import Epochs, Steps, Train
from edgegossip.contract.snapshot import assemble, dismantle
from edgegossip.data.dataset import WorkerData
from edgegossip.sim.pool import ComputePool
from edgegossip.training import graphs
from edgegossip.training.graphs import NUM_EAGER, HostWatch
from edgegossip.training.learner import Learner
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import Importance
from edgegossip.training.stacked.learner import StackedLearner
from edgegossip.training.step import TrainingStep
from edgegossip.training.task import Workload

# As a float32 in the graph and a Python float outside, this rate is the same number.
RATE = 2**-5
GRAPHED = TrainingStep(cuda_graph=True)


class Fused(SGD):
    """SGD with the kernel that a graph uses, which rounds as the others do not."""

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = super().__call__(params)
        for group in made.param_groups:
            group["fused"] = True
        return made


class FusedByLayer:
    """The same without a flat vector: an optimizer with a state for each layer."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        self._make = Fused(**settings)

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self._make(params)


KINDS: dict[str, Any] = {
    "momentum": Fused(lr=RATE, momentum=0.5),
    "nesterov": Fused(lr=RATE, momentum=0.5, nesterov=True, weight_decay=0.25),
    "no momentum": Fused(lr=RATE, momentum=0.0),
    "by layer": FusedByLayer(lr=RATE, momentum=0.5),
}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    made = TapeRecorder()
    monkeypatch.setattr(graphs, "recorder", lambda torch_device: made)
    monkeypatch.setattr(graphs, "_SAID", set())
    return made


Trace = list[tuple[Tensor, float]]


def trace_of(some: Learner, requests: Iterable[dict[str, Any]]) -> Trace:
    """The parameters and loss after each request, each from the parameters of the last."""
    params, found = some.model.params.clone(), []
    for request in requests:
        result = some.train(Train(params, **request))
        params = result.params
        found.append((params, result.loss))
    return found


def assert_equal(one: Trace, other: Trace) -> None:
    for (params, loss), (theirs, their_loss) in zip(one, other, strict=True):
        assert torch.equal(params, theirs)
        assert loss == their_loss


REQUESTS: list[dict[str, Any]] = [
    {"work": Steps(6)},
    {"work": Epochs(), "batch_ratio": 3 / 8},  # batches of 3, with a smaller last one
    {"work": Steps(5), "rate_ratio": 0.5},
    {"work": Steps(3)},
    {"work": Steps(9), "batch_ratio": 3 / 8, "rate_ratio": 2.0},
]


@pytest.mark.parametrize("optimizer", KINDS.values(), ids=KINDS)
def test_a_graph_trains_as_single_steps_do(recorder: TapeRecorder, optimizer: Any) -> None:  # noqa: ANN401
    plain = trace_of(learner(optimizer=optimizer), REQUESTS)
    assert recorder.num_recorded == 0
    assert_equal(trace_of(learner(optimizer=optimizer, step=GRAPHED), REQUESTS), plain)
    assert recorder.num_recorded == 2  # for batches of 8 and of 3
    assert recorder.num_repeated > 15


@thorough
@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_takes_the_steps_of_every_network(recorder: TapeRecorder, name: str) -> None:
    make, settings = NETWORKS[name]
    changes: dict[str, Any] = {"model": seeded(make), "augmentation": None, **settings}
    changes |= {"optimizer": KINDS["momentum"], "shard": torch.arange(40)}
    requests = [{"work": Steps(4)}, {"work": Steps(2)}]
    plain = trace_of(learner(**changes), requests)
    assert_equal(trace_of(learner(**changes, step=GRAPHED), requests), plain)
    assert (recorder.num_recorded, recorder.num_repeated) == (1, 3)


@pytest.mark.parametrize(
    "settings",
    [{"max_grad_norm": 0.1}, {"micro_batch_size": 3}, {"autocast": torch.bfloat16}],
    ids=str,
)
def test_other_steps_can_be_captured(recorder: TapeRecorder, settings: dict[str, Any]) -> None:
    optimizer = KINDS["momentum"]
    plain = trace_of(learner(optimizer=optimizer, step=TrainingStep(**settings)), REQUESTS)
    graphed = learner(optimizer=optimizer, step=replace(GRAPHED, **settings))
    assert_equal(trace_of(graphed, REQUESTS), plain)
    assert recorder.num_recorded == 2


def test_our_sgd_becomes_one_that_reads_its_rate_from_the_device(
    recorder: TapeRecorder,
) -> None:
    some = learner(optimizer=SGD(lr=RATE, momentum=0.5), step=GRAPHED)
    plain = learner(optimizer=KINDS["momentum"])
    assert_equal(trace_of(some, REQUESTS), trace_of(plain, REQUESTS))
    assert recorder.num_recorded == 2


def test_another_momentum_is_another_graph(recorder: TapeRecorder) -> None:
    optimizer = KINDS["momentum"]
    requests = [{"work": Steps(6), "momentum": each} for each in (None, 0.25, None, 0.25)]
    plain = trace_of(learner(optimizer=optimizer), requests)
    assert_equal(trace_of(learner(optimizer=optimizer, step=GRAPHED), requests), plain)
    assert recorder.num_recorded == 2


@pytest.mark.parametrize("optimizer", KINDS.values(), ids=KINDS)
def test_learners_share_the_graphs_of_a_copy(recorder: TapeRecorder, optimizer: Any) -> None:  # noqa: ANN401
    def traces(step: TrainingStep) -> list[Trace]:
        first = learner(optimizer=optimizer, step=step)
        copies = first.settings.copies()
        shard = WorkerData(dataset=DATA.training, shard=SHARD)
        some = [Learner(first.settings, shard, rank=rank, copies=copies) for rank in range(3)]
        found: list[Trace] = [[] for _ in some]
        params = [each.model.params.clone() for each in some]
        for each in some:
            each.rest()
        for _ in range(4):
            for rank, each in enumerate(some):
                result = each.train(Train(params[rank], Steps(3)))
                params[rank] = result.params
                found[rank].append((result.params, result.loss))
                each.rest()  # the next one borrows this copy, with its graph
        return found

    for own, plain in zip(traces(GRAPHED), traces(TrainingStep()), strict=True):
        assert_equal(own, plain)
    assert recorder.num_recorded == 1
    assert recorder.num_repeated > 20


@pytest.mark.parametrize("optimizer", KINDS.values(), ids=KINDS)
def test_a_fresh_start_and_a_checkpoint_reach_the_graph(
    recorder: TapeRecorder,
    optimizer: Any,  # noqa: ANN401
) -> None:
    def trace(step: TrainingStep) -> Trace:
        some = learner(optimizer=optimizer, step=step)
        found = trace_of(some, [{"work": Steps(7)}])
        kept = deepcopy(dismantle(some.state_dict()))  # the optimizer goes on with its tensors
        found += trace_of(some, [{"work": Steps(3)}])
        some.start_over()
        found += trace_of(some, [{"work": Steps(3)}])
        some.load_state_dict(assemble(*deepcopy(kept)))
        found += trace_of(some, [{"work": Steps(3)}])
        other = learner(optimizer=optimizer, step=step)
        other.load_state_dict(assemble(*deepcopy(kept)))
        return found + trace_of(other, [{"work": Steps(8)}])

    plain = trace(TrainingStep())
    assert_equal(trace(GRAPHED), plain)
    assert recorder.num_recorded == 2  # one for each learner
    assert recorder.num_repeated > 15


def test_the_first_steps_are_eager(recorder: TapeRecorder) -> None:
    some = learner(optimizer=KINDS["momentum"], step=GRAPHED)
    trace_of(some, [{"work": Steps(NUM_EAGER)}])
    assert (recorder.num_recorded, recorder.num_repeated) == (0, 0)
    trace_of(some, [{"work": Steps(2)}])
    assert (recorder.num_recorded, recorder.num_repeated) == (1, 2)


@thorough
def test_samples_with_losses_or_weights_are_trained_without_a_graph(
    recorder: TapeRecorder,
) -> None:
    aware = AccuracyAware(selection=Importance())
    some = learner(optimizer=KINDS["momentum"], step=GRAPHED, accuracy_aware=aware)
    trace_of(some, [{"work": Steps(8)}])
    assert recorder.num_recorded == 0


def test_without_a_gpu_nothing_changes() -> None:
    plain = trace_of(learner(), REQUESTS)
    assert_equal(trace_of(learner(step=GRAPHED), REQUESTS), plain)


def test_compiled_steps_are_not_captured() -> None:
    with pytest.raises(ValueError, match="compile and cuda_graph do not work together"):
        TrainingStep(compile=True, cuda_graph=True)


# What cannot be captured.


def with_item(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(outputs, targets)
    return loss * (1.0 if float(loss.detach()) > 0 else 2.0)


def with_mask(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs[targets > 0], targets[targets > 0])


def replacing(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr=RATE, momentum=0.5)
    made.register_step_post_hook(_replace)
    return made


def _replace(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].clone()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss": with_item}, "aten._local_scalar_dense.default needs the host"),
        ({"loss": with_mask}, "aten.index.Tensor needs the host"),
        ({"optimizer": OPTIMIZERS["own"]}, "Slowing is not PyTorch's"),
        ({"optimizer": OPTIMIZERS["adagrad"]}, "PyTorch cannot capture Adagrad"),
        ({"optimizer": replacing}, "the optimizer replaces 'momentum_buffer' in its state"),
    ],
    ids=["item", "mask", "own optimizer", "adagrad", "replacing"],
)
def test_a_step_that_needs_the_host_stays_eager_and_says_why_once(
    recorder: TapeRecorder,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    reason: str,
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        some = learner(step=GRAPHED, **{"optimizer": SGD(lr=RATE)} | changes)
        trace = trace_of(some, [{"work": Steps(8)}])
        assert trace[0][1] > 0
    assert recorder.num_recorded == 0
    assert [each.getMessage() for each in caplog.records] == [
        f"cuda_graph has no effect: {caplog.records[0].args[0]}"  # type: ignore[index]
    ]
    assert reason in caplog.text


def watched(compute: Callable[[], object], torch_device: str = "meta") -> str | None:
    watch = HostWatch(torch.device(torch_device))
    with watch:
        compute()
    return watch.found


def test_the_watch_finds_what_a_graph_would_not_repeat() -> None:
    x = torch.ones(3, device="meta")
    assert watched(lambda: x * 2 + x.sum()) is None
    assert watched(lambda: torch.ones(3).to("meta")) == "aten.ones.default"
    assert watched(lambda: x + torch.tensor(1.0)) is not None
    here, indices = torch.arange(3.0), torch.tensor([2, 0])
    assert watched(lambda: here[indices], "cpu") is None
    assert watched(lambda: here[here > 1], "cpu") == "aten.index.Tensor"
    assert watched(lambda: bool(here[0] > 1), "cpu") is not None
    assert watched(lambda: here.tolist(), "cpu") is None  # reads memory without an operation
    query = torch.ones(1, 1, 2, 4, device="meta")
    attend = F.scaled_dot_product_attention
    assert watched(lambda: attend(query, query, query, is_causal=True)) is None


def test_a_stack_repeats_its_steps_as_graphs(recorder: TapeRecorder) -> None:
    found = []
    for step in (TrainingStep(), GRAPHED):
        changes = {"step": step, "trainer": StackedLearner, "batch_size": 4}
        task = small_task(dataset=flat_data(54), optimizer=SGD(lr=RATE), **changes)
        workload = Workload(task, range(3), seed=0)
        learners = [workload.make_trainer(rank) for rank in range(3)]
        params = [workload.initial_params()] * 3
        with ComputePool(0) as pool:
            for rate_ratio in (1.0, 0.5, 2.0):  # each pass has four batches of 4, and one of 2
                pending = [
                    pool.train(each, Train(x, Epochs(), rate_ratio=rate_ratio), 0.0)
                    for each, x in zip(learners, params, strict=True)
                ]
                params = [each.result().params for each in pending]
        found.append(torch.stack(params))
    assert torch.equal(*found)
    assert recorder.num_recorded == 1
    assert recorder.num_repeated == 3 * 4 - NUM_EAGER


class Reads(torch.autograd.Function):
    """Reads a number from the device, where `torch.vmap` does not see it."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ANN401
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:  # noqa: ANN401
        return x * max(1.0, x.detach().max().item()), in_dims[0]


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = Reads.apply(x)  # type: ignore[no-untyped-call]
        return outputs


def test_a_stack_whose_steps_need_the_host_stays_eager(
    recorder: TapeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    task = dense_task(
        dataset=flat_data(54),
        step=GRAPHED,
        trainer=StackedLearner,
        model=lambda: nn.Sequential(dense(), Reading()),
    )
    workload = Workload(task, range(1), seed=0)
    workload.make_trainer(0).train(Train(workload.initial_params(), Steps(6)))
    assert recorder.num_recorded == 0
    assert "needs the host" in caplog.text
