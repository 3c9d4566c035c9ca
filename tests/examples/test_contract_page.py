"""The four systems of `docs/contract.md`, run as they stand on the page, in the simulator."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from edgegossip.algorithms.all_reduce import AllReduce
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.rounds import RoundState
from edgegossip.core.metrics import consensus_distance
from edgegossip.core.protocol import (
    Epochs,
    Message,
    Payload,
    Rank,
    Seconds,
    Steps,
    TimerFired,
    Trained,
    TrainingResult,
    Work,
)
from edgegossip.core.randomness import generator
from edgegossip.core.topology import complete, one_peer_exponential
from edgegossip.learning.quadratic import QuadraticTrainer
from edgegossip.sim.fault import Crash, Drop, Fault, Faults, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform, uneven
from edgegossip.sim.simulator import Simulator

HEADERS = Path(__file__).with_name("contract_headers.py")
PAGE = Path("/tmp/contract_new/new.md")  # TMP
SLOT = "    # The page's next block.\n"

NUM_PARAMS = 12
TARGETS = torch.randn(8, NUM_PARAMS, generator=generator(0, "targets"), dtype=torch.float64)
LINKS = Links(default=Link(latency=0.1))


def page_source() -> str:
    """The page's code as one module."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    first, *others = HEADERS.read_text(encoding="utf-8").split(SLOT)
    pairs = zip(blocks, others, strict=True)
    return first + "".join(textwrap.indent(block, "    ") + rest for block, rest in pairs)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("contract") / "contract_page.py"
    path.write_text(page_source(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def simulate(algorithm: Any, speeds: Sequence[float], *script: Fault, **arguments: Any) -> Any:
    """A simulator of workers that pull towards `TARGETS`, unless told otherwise."""
    arguments = {
        "initial_params": torch.zeros(NUM_PARAMS, dtype=torch.float64),
        "make_trainer": lambda rank, _: QuadraticTrainer(TARGETS[rank], 0.05),
        "seed": 0,
        **arguments,
    }
    faults = Faults(script=script, seed=arguments.pop("seed"))
    platforms = [Platform(throughput=speed) for speed in speeds]
    return Simulator(algorithm, platforms, links=LINKS, faults=faults, wire=True, **arguments)


@dataclass
class Recorder:
    """Keeps who finished which training when."""

    trained_at: list[tuple[Rank, Seconds, Seconds, Trained]] = field(default_factory=list)

    def trained(self, now: Seconds, rank: Rank, start: Seconds, event: Trained) -> None:
        self.trained_at.append((rank, start, now, event))

    def sent(self, *_: object) -> None: ...

    def received(self, *_: object) -> None: ...

    def lost(self, *_: object) -> None: ...

    def changed(self, *_: object) -> None: ...


# 1. ADSP.

# As shards of shuffled data are: nearly alike.
SIMILAR_TARGETS = TARGETS[0] + 0.05 * TARGETS
ADSP_SPEEDS = (1.0, 10.0, 8.0, 3.0, 2.5)


def simulate_adsp(page: Any, *script: Fault) -> tuple[Any, Tensor]:
    algorithm = page.ADSP(
        num_workers=4, window=20.0, epoch=200.0, duration=400.0, min_interval=1.0
    )
    optimum = SIMILAR_TARGETS[1:5].mean(0)
    simulator = simulate(
        algorithm,
        ADSP_SPEEDS,
        *script,
        make_trainer=lambda rank, _: QuadraticTrainer(SIMILAR_TARGETS[rank], 0.005),
        evaluate=lambda params: (0.5 * float((params - optimum).square().sum()), 0.0),
    )
    assert simulator.run(), "the run did not end"
    return simulator, (simulator.estimates()[0] - optimum).norm() / optimum.norm()


@pytest.mark.parametrize("drop_probability", [0.0, 0.2])
def test_adsp_ends_and_brings_the_server_to_the_optimum(
    page: Any, drop_probability: float
) -> None:
    simulator, distance = simulate_adsp(page, Drop(probability=drop_probability))
    server, *workers = simulator.states
    num_commits = [worker.round for worker in workers]
    assert server.rate > 1  # the search took place
    assert max(num_commits) <= 1.2 * min(num_commits)  # though speeds differ four times
    assert distance < 0.05
    if not drop_probability:
        assert sum(server.num_commits.values()) == sum(num_commits)


def test_adsp_outlives_the_crash_of_a_worker_that_comes_back(page: Any) -> None:
    script = (Drop(probability=0.1), Crash(at=100.0, rank=2), Recover(at=200.0, rank=2))
    simulator, distance = simulate_adsp(page, *script)
    assert simulator.states[2].round > 1
    assert distance < 0.05
    apart = simulator.states[2].params - simulator.states[0].params
    assert apart.norm() < 0.05 * SIMILAR_TARGETS[0].norm()


# 2. Sparse-Push.


class Identity:
    def compress(self, tensor: Tensor) -> Payload:
        return {"values": tensor}

    def decompress(self, payload: Payload) -> Tensor:
        return payload["values"]


@dataclass(frozen=True)
class TopK:
    """The largest entries by magnitude."""

    num_kept: int

    def compress(self, tensor: Tensor) -> Payload:
        indices = tensor.abs().topk(self.num_kept).indices
        return {"values": tensor[indices], "indices": indices}

    def decompress(self, payload: Payload) -> Tensor:
        dense = torch.zeros(NUM_PARAMS, dtype=payload["values"].dtype)
        dense[payload["indices"]] = payload["values"]
        return dense


def simulate_sparse_push(
    kind: Any, num_rounds: int, *script: Fault, lr: float = 0.0, **fields: Any
) -> Any:
    """Eight workers; without a learning rate, each starts where its target is."""
    fields = {"compressor": Identity(), "consensus_step": 1.0, "timeout": 1.5, **fields}
    algorithm = kind(topology=one_peer_exponential(8), num_rounds=num_rounds, **fields)
    speeds = (1.0,)*8 if lr else (1.0, 0.9, 0.5, 0.3, 1.0, 1.0, 0.8, 0.7)
    simulator = simulate(
        algorithm,
        speeds,
        *script,
        make_trainer=lambda rank, _: QuadraticTrainer(TARGETS[rank], lr),
    )
    if not lr:
        for state, target in zip(simulator.states, TARGETS, strict=True):
            state.params = target
    return simulator


def total_mass(states: Sequence[Any]) -> Tensor:
    """Numerators and weight, of workers and of messages not yet merged, [num_params + 1]."""
    masses = [torch.cat([state.params, torch.tensor([state.weight], dtype=torch.float64)]) for state in states]
    for state in states:
        for (receiver, number), message in state.unacknowledged.items():
            if (state.rank, number) not in states[receiver].merged:
                masses.append(mass_of(message))
    return torch.stack(masses).sum(0)


def mass_of(message: Message) -> Tensor:
    payload = message.payload
    dense = (TopK(2) if "indices" in payload else Identity()).decompress(payload)
    return torch.cat([payload["share"] * dense, payload["weight"][None]])


@pytest.mark.parametrize(
    ("compressor", "consensus_step", "num_rounds"),
    [(Identity(), 1.0, 40), (TopK(2), 0.1, 200)],
    ids=["dense", "sparse"],
)
def test_sparse_push_conserves_mass_where_a_third_of_the_messages_is_lost(
    page: Any, compressor: Any, consensus_step: float, num_rounds: int
) -> None:
    simulator = simulate_sparse_push(
        page.SparsePush,
        num_rounds,
        Drop(probability=0.3),
        compressor=compressor,
        consensus_step=consensus_step,
    )
    expected = torch.cat([TARGETS.sum(0), torch.tensor([8.0], dtype=torch.float64)])
    start = consensus_distance(TARGETS)
    until = 0.0
    while not simulator.run(until):
        torch.testing.assert_close(total_mass(simulator.states), expected, rtol=0, atol=1e-9)
        until += num_rounds / 20
    # At the end nothing is under way: every share has been merged and acknowledged.
    assert not any(state.unacknowledged for state in simulator.states)
    assert sum(state.weight for state in simulator.states) == pytest.approx(8)
    estimates = torch.stack(simulator.estimates())
    assert consensus_distance(estimates) < 0.2 * start
    assert (estimates.mean(0) - TARGETS.mean(0)).norm() < 0.2 * start


def test_taking_back_instead_of_sending_again_would_double_mass(page: Any) -> None:
    class TakingBack(page.SparsePush):  # type: ignore[misc]
        def handle(self, state: Any, event: Any, now: Seconds) -> Any:
            if isinstance(event, TimerFired):
                for message in state.unacknowledged.values():
                    self.merge(state, message.payload)
                state.unacknowledged.clear()
                return self.finish_if_done(state)
            return super().handle(state, event, now)

    simulator = simulate_sparse_push(TakingBack, 60, Drop(probability=0.3))
    assert simulator.run()
    assert sum(state.weight for state in simulator.states) > 10


def test_sparse_push_outlives_the_crash_of_a_worker_that_comes_back(page: Any) -> None:
    simulator = simulate_sparse_push(
        page.SparsePush,
        120,
        Drop(probability=0.2),
        Crash(at=20.5, rank=2),
        Recover(at=40.5, rank=2),
        lr=0.02,
    )
    assert not simulator.run(until=30.0)
    # Of what was for worker 2, nothing is awaited any more.
    assert not any((2, n) in s.unacknowledged for s in simulator.states for n in range(120))
    assert simulator.run()
    assert [state.round for state in simulator.states] == [120] * 8
    assert not any(state.unacknowledged for state in simulator.states)
    print([round(float(x.weight),2) for x in simulator.states], simulator.now)
    errors = torch.stack(simulator.estimates()) - TARGETS.mean(0)
    assert errors.norm(dim=1).max() < 0.3 * TARGETS.mean(0).norm()


def test_sparse_push_finishes_when_the_last_receiver_is_lost(page: Any) -> None:
    # All that is sent to worker 3 is lost, and then so is worker 3.
    script = (Drop(probability=1.0, receiver=3), Crash(at=60.0, rank=3))
    simulator = simulate_sparse_push(page.SparsePush, 10, *script)
    assert not simulator.run(until=59.0)
    assert simulator.run()
    assert simulator.now == pytest.approx(61.0)  # a second later it is noticed
    others = [state for state in simulator.states if state.rank != 3]
    assert not any(state.unacknowledged for state in others)


# 3. EdgeGossip.


class EpochAllReduce(AllReduce):
    """Exact averaging after each epoch."""

    def work(self, state: RoundState) -> Work | None:
        return None if state.round % 2 else Epochs()


@dataclass(frozen=True)
class ShardTrainer(QuadraticTrainer):
    """Passes over `shard_size` samples, in batches of 5."""

    shard_size: int = 100

    @property
    def num_samples(self) -> int:
        return self.shard_size

    def cost(self, work: Work, inputs: Payload) -> float:
        assert isinstance(work, Epochs)
        return 5 * round(work.share * self.shard_size / 5)

    def train(self, params: Tensor, work: Work, inputs: Payload) -> TrainingResult:
        num_steps = int(self.cost(work, inputs)) // 5
        # `super()` without arguments does not work in a dataclass with slots.
        result = QuadraticTrainer.train(self, params, Steps(num_steps), inputs)
        return TrainingResult(result.params, 5 * num_steps, num_steps, result.loss)


NUM_EPOCHS = 8
SHARD_SIZES = (1000, 1000, 800, 600)
THROUGHPUTS = tuple(platform.throughput for platform in uneven(4, throughput=100.0))
EPOCH_WISE = {
    "epoch-gossip": EpochGossip(topology=complete(4), num_rounds=NUM_EPOCHS, timeout=60.0),
    "all-reduce": EpochAllReduce(topology=complete(4), num_rounds=NUM_EPOCHS, timeout=60.0),
}
each_inner = pytest.mark.parametrize("inner", EPOCH_WISE.values(), ids=EPOCH_WISE)


def simulate_epochs(algorithm: Any, *script: Fault) -> tuple[Any, Recorder]:
    recorder = Recorder()
    simulator = simulate(
        algorithm,
        THROUGHPUTS,
        *script,
        make_trainer=lambda rank, _: ShardTrainer(TARGETS[rank], 0.002, SHARD_SIZES[rank]),
        observer=recorder,
    )
    assert simulator.run(), "the run did not end"
    return simulator, recorder


@each_inner
def test_edge_gossip_lets_epochs_end_together_and_is_faster(page: Any, inner: Any) -> None:
    balanced = page.EdgeGossip(inner=inner, num_workers=4, timeout=5.0)
    simulator, recorder = simulate_epochs(balanced)
    alone, _ = simulate_epochs(inner)
    ends = [end for _, _, end, _ in recorder.trained_at]
    assert len(ends) == 4 * NUM_EPOCHS
    for k in range(0, len(ends), 4):
        assert max(ends[k : k + 4]) - min(ends[k : k + 4]) < 0.5  # of 10 to 24 s
    assert simulator.now < 0.5 * alone.now
    estimates = torch.stack(simulator.estimates())
    assert consensus_distance(estimates) < 1e-9  # the inner algorithm averages exactly


@each_inner
def test_edge_gossip_gets_over_lost_forecasts_and_a_lost_worker(page: Any, inner: Any) -> None:
    balanced = page.EdgeGossip(inner=inner, num_workers=4, timeout=5.0)
    script = (Drop(probability=0.1), Crash(at=25.0, rank=3), Recover(at=50.0, rank=3))
    simulator, recorder = simulate_epochs(balanced, *script)
    rounds = [state.round for state in simulator.states]
    assert rounds == [NUM_EPOCHS * inner.exchanges_per_round] * 4
    assert {rank for rank, start, _, _ in recorder.trained_at if start > 50.0} == {0, 1, 2, 3}
    print([(r,round(s,1),round(e-s,1)) for r,s,e,_ in recorder.trained_at])
    # Everyone has heard of the fastest by now, and nobody trains much longer than it.
    assert all(end - start < 10.5 for _, start, end, _ in recorder.trained_at if start > 50.0)


# 4. Stages.

BATCH_SIZE = 16
LABELS_OF = (
    torch.randn(6, 3, generator=generator(0, "labels")) * 0.4
)  # [num_inputs, num_labels]
WIDTHS = ((6, 12), (12, 12), (12, 3))


@dataclass
class StageTrainer:
    """One layer of three, and a linear guess of the gradient at its output.

    The guess sees the activations and the labels, as in the paper, and begins as zero.
    """

    rank: Rank
    losses: list[float]
    num_samples: ClassVar[int] = 10_000

    def __post_init__(self) -> None:
        num_in, num_out = WIDTHS[self.rank]
        self.draws = generator(0, "stage", self.rank)
        self.layer = torch.nn.Linear(num_in, num_out)
        weight = torch.randn(num_out, num_in, generator=self.draws) / num_in**0.5
        self.layer.load_state_dict({"weight": weight, "bias": torch.zeros(num_out)})
        self.guess = torch.nn.Linear(num_out + 3, num_out)
        for parameter in self.guess.parameters():
            torch.nn.init.zeros_(parameter)
        self.parameters = [*self.layer.parameters(), *self.guess.parameters()]

    @property
    def params(self) -> Tensor:
        return torch.nn.utils.parameters_to_vector(self.parameters).detach()

    def cost(self, work: Work, inputs: Payload) -> float:
        return BATCH_SIZE / (12 if "gradient" in inputs else 3)

    def train(self, params: Tensor, work: Work, inputs: Payload) -> TrainingResult:
        torch.nn.utils.vector_to_parameters(params.clone(), self.parameters)
        optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        optimizer.zero_grad()
        outputs = {} if "gradient" in inputs else self.train_layer(inputs)
        if "gradient" in inputs:
            guess = self.guess(torch.cat([inputs["activations"], inputs["labels"]], 1))
            (guess - inputs["gradient"]).square().sum(1).mean().backward()
        optimizer.step()
        return TrainingResult(self.params, BATCH_SIZE, 1, 0.0, outputs)

    def train_layer(self, inputs: Payload) -> dict[str, Tensor]:
        below = inputs.get("activations")
        if below is None:
            below = torch.randn(BATCH_SIZE, WIDTHS[0][0], generator=self.draws)
        labels = inputs.get("labels", below @ LABELS_OF if self.rank == 0 else below)
        below = below.clone().requires_grad_()
        above = self.layer(below)
        if self.rank == 2:
            loss = (above - labels).square().sum(1).mean()
            loss.backward()
            self.losses.append(loss.item())
        else:
            above = above.tanh()
            guess = self.guess(torch.cat([above.detach(), labels], 1)).detach()
            # Gradients are per sample, losses their mean.
            ((above * guess).sum() / BATCH_SIZE).backward()
        assert below.grad is not None
        gradient = below.grad * BATCH_SIZE
        return {"activations": above.detach(), "labels": labels, "gradient": gradient}

    def state_dict(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("drop_probability", [0.0, 0.1])
def test_stages_learn_from_guessed_gradients(page: Any, drop_probability: float) -> None:
    num_rounds = 150
    algorithm = page.Stages(num_stages=3, num_rounds=num_rounds, depth=4, timeout=5.0)
    losses: list[float] = []
    trainers = [StageTrainer(rank, losses) for rank in range(3)]
    simulator = simulate(
        algorithm,
        (100.0, 70.0, 200.0),
        Drop(probability=drop_probability),
        make_trainer=lambda rank, _: trainers[rank],
    )
    # The simulator starts all ranks from one vector; stages are not alike.
    for state, trainer in zip(simulator.states, trainers, strict=True):
        state.params = trainer.params
    assert simulator.run(), "the run did not end"
    assert not any(state.jobs or state.job for state in simulator.states)
    handled = [state.round for state in simulator.states]
    assert handled[0] == num_rounds
    assert handled[2] == len(losses)
    if not drop_probability:
        assert handled == [num_rounds] * 3
    first, last = torch.tensor(losses[:20]).mean(), torch.tensor(losses[-20:]).mean()
    assert last < 0.3 * first


@pytest.mark.slow
def test_the_code_of_the_page_has_types(tmp_path: Path, page: Any) -> None:
    api = pytest.importorskip("mypy.api")
    path = tmp_path / "contract_types.py"
    path.write_text(
        page_source()
        + textwrap.dedent("""
        systems: tuple[
            type[Algorithm[CommitterState | ServerState]],
            type[Algorithm[SparsePushState]],
            type[Algorithm[BalancedState[StageState]]],
            type[Algorithm[StageState]],
        ] = (ADSP, SparsePush, EdgeGossip[StageState], Stages)
        """),
        encoding="utf-8",
    )
    config = PAGE.parents[1] / "pyproject.toml"
    report, errors, status = api.run(
        ["--strict", "--config-file", str(config), "--cache-dir", str(tmp_path), str(path)]
    )
    assert status == 0, report + errors
