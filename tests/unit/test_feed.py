"""Batches on their way to a device: the same as on a CPU, and nothing waits for the device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.small_learners import DATA, SHARD, learner, start
from torch import Tensor, nn

from edgegossip.contract.protocol import Epochs, Steps, Train
from edgegossip.data.dataset import ArraySplit, Dataset, JoinedSplit, from_tensors
from edgegossip.data.read_ahead import Reader
from edgegossip.models.gpt import gpt
from edgegossip.training import feed
from edgegossip.training.feed import Feed, resident
from edgegossip.training.learner import Learner
from edgegossip.training.loss import TokenCrossEntropy, next_token
from edgegossip.training.optimizer import SGD
from edgegossip.training.sampling.accuracy_aware import AccuracyAware
from edgegossip.training.sampling.selection import Choice, Random
from edgegossip.training.step import TrainingStep

CPU = torch.device("cpu")
PART = replace(DATA.training, train=JoinedSplit((DATA.train, torch.arange(63, -1, -1))))


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a GPU with a gigabyte."""
    make_room(monkeypatch, 2**30)


def make_room(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(feed, "free_bytes", lambda torch_device: num_bytes)
    monkeypatch.setattr(feed, "_RESIDENT", weakref.WeakKeyDictionary())


def params_after(requests: list[dict[str, Any]], **changes: Any) -> list[Tensor]:  # noqa: ANN401
    some = learner(**{"augmentation": None} | changes)
    found = [start(some)]
    for request in requests:
        found.append(some.train(Train(found[-1], **request)).params)
    return found


REQUESTS: list[dict[str, Any]] = [
    {"work": Steps(7)},
    {"work": Epochs(), "batch_ratio": 3 / 8},
    {"work": Steps(2), "keep_ratio": 0.5},
    {"work": Epochs()},
]


@pytest.mark.parametrize("data", [DATA.training, PART], ids=["whole", "part"])
def test_a_resident_split_gives_the_same_batches(
    monkeypatch: pytest.MonkeyPatch,
    data: Any,  # noqa: ANN401
) -> None:
    expected = params_after(REQUESTS, dataset=data)
    make_room(monkeypatch, 2**30)
    monkeypatch.setattr(Reader, "read", None)  # nothing is read any more
    found = params_after(REQUESTS, dataset=data)
    assert all(map(torch.equal, found, expected))


def test_samples_of_any_structure_can_be_resident(roomy: None) -> None:
    x = {"a": torch.arange(12).view(6, 2), "b": torch.arange(6.0)}
    data = from_tensors("nested", train=x, test=x).training
    some = Feed(data, torch.tensor([5, 3, 1]), CPU)
    positions = [torch.tensor([2]), torch.tensor([0, 1])]
    inputs = some.inputs(positions[0], lambda number: positions[1:])
    assert inputs.tolist() == [1]
    assert some.prepare(inputs)["a"].tolist() == [[2, 3]]
    assert some.prepare(some.inputs(positions[1], lambda number: []))["b"].tolist() == [5, 3]


def test_indices_of_a_pass_are_copied_at_once(
    roomy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    split = torch.split

    def counted(tensor: Tensor, *arguments: Any) -> Any:  # noqa: ANN401
        copies.append(len(tensor))
        return split(tensor, *arguments)

    some = Feed(DATA.training, SHARD, CPU)
    order = [*split(torch.randperm(len(SHARD)), 5)]
    monkeypatch.setattr(torch, "split", counted)
    while order:
        positions = order.pop(0)
        some.inputs(positions, lambda most: order[:most])
    assert copies == [len(SHARD)]


def test_a_split_stays_in_main_memory_if_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split = ArraySplit(torch.zeros(100, 1, 2, 2, dtype=torch.uint8), torch.zeros(100).long())
    num_bytes = 100 * (4 + 8)
    needed = int(num_bytes / feed.RESIDENT_SHARE)
    make_room(monkeypatch, needed - 1)
    assert resident(split, CPU) is None
    monkeypatch.setattr(feed, "free_bytes", lambda torch_device: needed)
    assert resident(split, CPU) is None, "as decided before: learners would differ in speed"
    other = ArraySplit(split.x, split.y)
    moved = resident(other, CPU)
    assert moved is not None
    assert moved is resident(other, CPU), "one copy for all learners"


def test_augmented_and_mapped_samples_are_read_by_the_host(roomy: None) -> None:
    some = Feed(DATA.training, SHARD, CPU, augment=lambda samples: samples)
    x, _ = some.inputs(torch.tensor([0]), lambda number: [])
    assert x.dtype == torch.uint8
    mapped = ArraySplit(torch.zeros(3, 1), None)
    mapped.is_mapped = True
    assert resident(mapped, CPU) is None


# Nothing waits: on the device "meta", whose tensors have no values, reading one is an error.


@pytest.fixture
def no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda *device: made())  # there is none for "meta"


def dense() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 3))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def on_meta(**changes: Any) -> Learner:  # noqa: ANN401
    settings: dict[str, Any] = {
        "model": dense(),
        "optimizer": SGD(lr=0.1, weight_decay=0.1),
        "augmentation": None,
        "torch_device": "meta",
    }
    return learner(**settings | changes)


class Weighted(Random):
    """Random samples, whose losses have weights and are recorded."""

    needs_sample_losses: ClassVar[bool] = True

    def choose(self, *arguments: Any) -> Choice:  # noqa: ANN401
        choice = super().choose(*arguments)
        return replace(choice, weights=torch.ones(len(choice.order)))


text = from_tensors("text", train=torch.arange(640).view(64, 10) % 7).training
GPT: dict[str, Any] = {
    "model": gpt(num_tokens=7, context=9, width=8, num_layers=1, num_heads=2),
    "dataset": text,
    "forward": next_token,
    "loss": TokenCrossEntropy(),
    "optimizer": partial(torch.optim.AdamW, lr=0.01),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch norm": {"model": with_batch_norm(), "has_buffers": False},
    "text": GPT,
    "adam": {"optimizer": partial(torch.optim.Adam, lr=0.01)},
    "clipped": {"step": TrainingStep(max_grad_norm=0.1)},
    "micro-batches": {"step": TrainingStep(micro_batch_size=3)},
    "losses of samples": {"accuracy_aware": AccuracyAware(selection=Weighted())},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_step_reads_from_the_device(no_values: None, case: dict[str, Any]) -> None:
    some = on_meta(**case)
    batches = [*some.take(Train(torch.empty(0), Steps(4)))]  # of one pass
    losses = [some._step_on(batch) for batch in batches]
    assert [each.device.type for each in losses] == ["meta"] * 4
    with pytest.raises((RuntimeError, NotImplementedError)):
        losses[0].item()  # reading would have been noticed


def test_a_loss_that_is_read_is_noticed(no_values: None) -> None:
    def reading(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets)
        assert loss.detach().item() >= 0
        return loss

    some = on_meta(loss=reading)
    (batch,) = some.take(Train(torch.empty(0), Steps(1)))
    with pytest.raises(RuntimeError, match="meta"):
        some._step_on(batch)


def test_scaling_is_copied_to_a_device_once() -> None:
    data = Dataset(
        "noise",
        DATA.train,
        DATA.test,
        num_classes=3,
        input_shape=(1, 6, 6),
        mean=torch.tensor([0.4]),
        std=torch.tensor([0.25]),
    ).training
    x = torch.zeros(2, 1, 6, 6, dtype=torch.uint8, device="meta")
    data.prepare(x)
    kept = data._scalings[x.device]
    data.prepare(x)
    assert data._scalings[x.device] is kept
    assert "_scalings" not in data.__getstate__()


class FakeStream:
    """A stream or event that notes what is done to it, and to whose copies."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record_event(self) -> FakeStream:
        self.log.append("event recorded")
        return FakeStream(self.log, "event")

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


def test_copies_run_beside_the_steps_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    steps, copies = FakeStream(log, "steps"), FakeStream(log, "copies")

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda torch_device: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda torch_device: steps)
    monkeypatch.setattr(torch.cuda, "stream", on)

    def pinned(tensor: Tensor) -> Tensor:
        log.append("pinned")
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pinned)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: log.append("kept"))
    uploads = feed._Uploads(CPU)
    moved = uploads.begin({"x": torch.ones(2)})
    assert moved["x"].tolist() == [1, 1]
    whole = ["event recorded", "on copies", "pinned", "steps waits for copies", "kept"]
    assert log == whole
    for _ in range(7):
        uploads.begin({"x": torch.ones(2)})
    assert log == whole * 8
    uploads.begin({"x": torch.ones(2)})  # and no more than eight batches ahead of the steps
    assert log[40:] == [whole[0], "host waits for event", *whole[1:]]
