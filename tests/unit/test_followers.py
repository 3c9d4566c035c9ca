"""A worker that trains in several processes of `torch.distributed`: one exchanges, the others
follow.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from tests.process_groups import in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import TrainingError
from edgegossip.contract.topology import complete
from edgegossip.models.shared import group_of, without_ddp
from edgegossip.net.memory import MemoryNetwork
from edgegossip.real.processes import Processes, StepTotals
from edgegossip.real.training_loop import TrainingLoop

pytestmark = pytest.mark.thorough

NUM_SAMPLES, BATCH, DIM = 24, 8, 3
ALGORITHMS: dict[str, Algorithm[Any]] = {
    "epochs": EpochGossip(topology=complete(2), num_rounds=4),
    "steps": Gossip(topology=complete(2), num_rounds=4, local_steps=5),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    model[2].requires_grad_(False)
    return model.double()


def samples(worker: int) -> Tensor:
    generator = torch.Generator().manual_seed(1 + worker)
    return torch.randn(NUM_SAMPLES, DIM, generator=generator, dtype=torch.float64)


def train(
    model: nn.Module, loop: TrainingLoop, worker: int, share: slice = slice(None)
) -> list[Any]:
    """Train to the end on a share of each batch; returns what the loop says after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    said = []
    with loop:
        while not loop.is_over:
            for batch in torch.split(samples(worker), BATCH):
                x = batch[share].to(next(model.parameters()).device)
                loss = (model(x) - x.sum(1, keepdim=True) - worker).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loop.step(loss.item(), len(x))
                said.append([loop.is_over, loop.rounds, loop.progress, loop.rate_ratio])
    return said


def alone_beside(network: MemoryNetwork, algorithm: Algorithm[Any]) -> threading.Thread:
    """Worker 1, in one process: a thread."""

    model, transport = make_model(), network.transport(1)

    def run() -> None:
        loop = TrainingLoop(model, algorithm, 1, 2, transport, num_samples=NUM_SAMPLES)
        train(model, loop, 1)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def ddp_before(model: nn.Sequential, make: Callable[..., TrainingLoop]) -> Any:  # noqa: ANN401
    wrapped = DistributedDataParallel(model)
    return wrapped, make(wrapped)


def ddp_afterwards(model: nn.Sequential, make: Callable[..., TrainingLoop]) -> Any:  # noqa: ANN401
    loop = make(model, process_group=dist.group.WORLD)
    return DistributedDataParallel(model), loop


def ddp_with_views(model: nn.Sequential, make: Callable[..., TrainingLoop]) -> Any:  # noqa: ANN401
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, make(wrapped)


def sharded(model: nn.Sequential, make: Callable[..., TrainingLoop]) -> Any:  # noqa: ANN401
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    return model, make(model)


HAS_FSDP2 = hasattr(fsdp, "fully_shard")  # since PyTorch 2.6
WAYS = {each.__name__: each for each in (ddp_before, ddp_afterwards, ddp_with_views)}
if HAS_FSDP2:
    WAYS[sharded.__name__] = sharded


def whole(value: Tensor) -> list[Any]:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.tolist()


Run = tuple[list[Any], list[Any]]
"""A loop's properties after each step, and the final parameters."""


def one_worker_in_two(rank: int) -> dict[tuple[str, str], Run]:
    return {(way, name): followed(rank, way, name) for way in WAYS for name in ALGORITHMS}


def followed(rank: int, way: str, name: str, device: str = "cpu") -> Run:
    algorithm, network, original = ALGORITHMS[name], MemoryNetwork(), make_model().to(device)
    beside = alone_beside(network, algorithm) if rank == 0 else None

    def make(model: nn.Module, **options: Any) -> TrainingLoop:  # noqa: ANN401
        transport = network.transport(0) if rank == 0 else None
        return TrainingLoop(
            model, algorithm, 0, 2, transport, num_samples=NUM_SAMPLES, **options
        )

    model, loop = WAYS[way](original, make)
    half = BATCH // 2
    said = train(model, loop, 0, slice(rank * half, (rank + 1) * half))
    if beside is not None:
        beside.join(60)
    return said, [whole(each) for each in model.parameters()]


@pytest.fixture(scope="module")
def both_processes() -> list[dict[tuple[str, str], Run]]:
    return in_processes(2, one_worker_in_two)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_of_a_worker_do_what_one_with_whole_batches_does(
    way: str, name: str, both_processes: list[dict[tuple[str, str], Run]]
) -> None:
    algorithm, network, model = ALGORITHMS[name], MemoryNetwork(), make_model()
    beside = alone_beside(network, algorithm)
    transport = network.transport(0)
    loop = TrainingLoop(model, algorithm, 0, 2, transport, num_samples=NUM_SAMPLES)
    said = train(model, loop, 0)
    beside.join(60)
    first, second = (each[way, name] for each in both_processes)
    assert first == second
    assert first[0] == said
    for ours, theirs in zip(first[1], model.parameters(), strict=True):
        expected = theirs.detach()
        found = torch.tensor(ours, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def third_of_three(rank: int) -> list[Any]:
    """Worker 0 in the processes 1 and 2 of three, with a batch norm's running means."""
    group = dist.new_group([1, 2])
    if rank == 0:
        dist.barrier()  # the others need its store until they end
        return []
    torch.manual_seed(rank)  # the lead's initial parameters count
    model = nn.Sequential(nn.BatchNorm1d(DIM), nn.Linear(DIM, 1))
    algorithm = Gossip(topology=complete(1), num_rounds=2, local_steps=3)
    transport = MemoryNetwork().transport(0) if rank == 1 else None
    loop = TrainingLoop(model, algorithm, 0, 1, transport, num_samples=4, process_group=group)
    with loop:
        for number in range(6):
            model(torch.full((2, DIM), float(rank)) + torch.arange(2.0)[:, None] + number)
            loop.step(float(rank), 2)
    assert loop.is_over
    dist.barrier()
    return [each.tolist() for each in model.state_dict().values()]


def test_a_group_of_some_processes_has_the_parameters_and_buffers_of_its_first() -> None:
    other, first, second = in_processes(3, third_of_three)
    assert other == []
    assert first == second
    running_mean = first[2]
    assert running_mean == pytest.approx(
        [sum(0.1 * 0.9 ** (5 - k) * (1.5 + k) for k in range(6))] * DIM
    )


def goes_back(rank: int) -> tuple[list[bool], list[float]]:
    """Whether the loop has gone back after each step, where one process's loss is NaN."""
    network, model = MemoryNetwork(), make_model()
    algorithm = Gossip(topology=complete(2), num_rounds=4)
    if rank == 0:
        alone_beside(network, algorithm)
    transport = network.transport(0) if rank == 0 else None
    loop = TrainingLoop(
        model, algorithm, 0, 2, transport, num_samples=4, process_group=dist.group.WORLD
    )
    if rank == 0:
        loop._host._sound._credit = 1  # another worker has been blamed before
    found = []
    with loop:
        for number in range(5):
            loop.step(float("nan") if (rank, number) == (1, 2) else 1.0, 1)
            found.append(loop.has_gone_back)
    return found, [loop.rounds, loop.is_over]


def test_all_processes_go_back_if_the_loss_of_one_is_not_finite() -> None:
    first, second = in_processes(2, goes_back)
    assert first == second
    assert first == ([False, False, True, False, False], [4, True])


def looks(rank: int) -> list[int]:
    """The steps after which processes look up, without the limit of a second."""
    algorithm = Gossip(topology=complete(1), num_rounds=3, local_steps=50)
    found, losses = list[int](), list[float]()
    report = Processes.report

    def noted_report(processes: Processes) -> StepTotals:
        found.append(len(losses))
        return report(processes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Processes, "report", noted_report)
        patch.setattr("edgegossip.real.processes._LOOK", 1e9)
        with loop_of(rank, make_model(), algorithm=algorithm) as loop:
            while not loop.is_over:
                losses.append(1.0)
                loop.step(losses[-1], 1)
    return found


def test_processes_talk_only_when_an_exchange_is_due() -> None:
    # The first step shows how long a step takes.
    assert in_processes(2, looks) == [[1, 50, 100, 150]] * 2


def time_is_over(rank: int) -> tuple[int, list[list[float]], bool]:
    """Steps until the time is over, within the first of endless epochs, and the final model."""
    algorithm = EpochGossip(topology=complete(1), num_rounds=1)
    torch.manual_seed(rank)
    model, num_steps = nn.Linear(DIM, 1), 0
    loop = loop_of(
        rank, model, algorithm=algorithm, num_samples=10**9, max_seconds=0.2, final_average=True
    )
    with loop:
        while not loop.is_over:
            loop.step(1.0, 1)
            num_steps += 1
    assert loop.agreement is not None
    return num_steps, model.weight.tolist(), loop.agreement.is_apart


def test_the_end_in_the_midst_of_an_epoch_reaches_all_processes() -> None:
    first, second = in_processes(2, time_is_over)
    assert first == second
    assert not first[2]


def test_a_worker_alone_among_processes_needs_no_group() -> None:
    model = make_model()
    assert group_of(model, None) is None
    assert without_ddp(model) is model


# How they end.


def ends(rank: int, job: str) -> str:
    """Say how a process of worker 0 ends; see `ENDS`."""
    try:
        JOBS[job](rank)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def loop_of(rank: int, model: nn.Module, **options: Any) -> TrainingLoop:  # noqa: ANN401
    """The loop of worker 0, which is alone unless `options` say more; without DDP."""
    options = {
        "algorithm": Gossip(topology=complete(1), num_rounds=10**6, local_steps=3),
        "num_workers": 1,
        "num_samples": 4,
        "transport": MemoryNetwork().transport(0) if rank == 0 else None,
        **options,
    }
    return TrainingLoop(model, rank=0, process_group=dist.group.WORLD, **options)


def loss_of_one_is_nan(rank: int) -> None:
    with loop_of(rank, make_model()) as loop:
        for number in range(10**6):
            loop.step(float("nan") if (rank, number) == (1, 4) else 1.0, 1)


def script_of_the_lead_fails(rank: int) -> None:
    with loop_of(rank, make_model()) as loop:
        for number in range(10**6):
            if (rank, number) == (0, 5):
                raise KeyboardInterrupt
            loop.step(1.0, 1)


def script_of_the_other_fails(rank: int) -> None:
    with loop_of(rank, make_model()) as loop:
        for number in range(10**6):
            if (rank, number) == (1, 5):
                raise ZeroDivisionError("no more data")
            loop.step(1.0, 1)


def the_lead_is_interrupted_while_it_waits(rank: int) -> None:
    algorithm = Gossip(topology=complete(2), num_rounds=1)
    loop = loop_of(rank, make_model(), algorithm=algorithm, num_workers=2)
    if rank == 0:
        interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
    with loop:
        pass


def nobody_else_comes(rank: int) -> None:
    algorithm = Gossip(topology=complete(2), num_rounds=1)
    with loop_of(rank, make_model(), algorithm=algorithm, num_workers=2, meet_seconds=0.3):
        pass


def the_lead_has_no_transport(rank: int) -> None:
    with loop_of(rank, make_model(), transport=None):
        pass


def the_lead_leaves_early(rank: int) -> None:
    with loop_of(rank, make_model()) as loop:
        for _ in range(4 if rank == 0 else 10**6):
            loop.step(1.0, 1)


def evaluate_a_sharded_model(rank: int) -> None:
    sharded(make_model(), lambda model: loop_of(rank, model, evaluate=lambda model: 0.0))


def an_older_kind_of_sharding(rank: int) -> None:
    model = fsdp.FullyShardedDataParallel(make_model()[0], device_id=torch.device("cpu"))
    loop_of(rank, model)


LEFT = "process 0 of this worker has left the run: "
ENDS: dict[Callable[[int], None], tuple[str, str]] = {
    loss_of_one_is_nan: (
        "TrainingError: the loss became nan; try a smaller learning rate",
        f"TrainingError: {LEFT}the loss became nan; try a smaller learning rate",
    ),
    script_of_the_lead_fails: (
        "KeyboardInterrupt: ",
        f"TrainingError: {LEFT}KeyboardInterrupt",
    ),
    script_of_the_other_fails: (
        "TrainingError: process 1 of this worker has left the run: ZeroDivisionError: no more",
        "ZeroDivisionError: no more data",
    ),
    the_lead_is_interrupted_while_it_waits: (
        "KeyboardInterrupt: ",
        f"TrainingError: {LEFT}KeyboardInterrupt",
    ),
    nobody_else_comes: ("NetworkError: ", f"NetworkError: {LEFT}"),
    the_lead_has_no_transport: (
        "ValueError: transport is None, which only a process that follows another may have",
        f"TrainingError: {LEFT}ValueError: transport is None",
    ),
    the_lead_leaves_early: ("nothing", f"TrainingError: {LEFT}its loop ended before the run"),
    an_older_kind_of_sharding: (
        "UsageError: FullyShardedDataParallel (FSDP1) keeps the parameters where no exchange",
        "UsageError: FullyShardedDataParallel (FSDP1) keeps the parameters where no exchange",
    ),
}
if HAS_FSDP2:
    needs = "ValueError: evaluate needs a copy of the model"
    ENDS[evaluate_a_sharded_model] = (needs, needs)
JOBS = {each.__name__: each for each in ENDS}


def all_ends(rank: int) -> dict[str, str]:
    return {job: ends(rank, job) for job in JOBS}


@pytest.fixture(scope="module")
def ends_of_both() -> list[dict[str, str]]:
    return in_processes(2, all_ends)


@pytest.mark.parametrize("job", JOBS)
def test_an_error_of_one_process_ends_the_other(
    job: str, ends_of_both: list[dict[str, str]]
) -> None:
    for found, expected in zip(ends_of_both, ENDS[JOBS[job]], strict=True):
        assert found[job].startswith(expected)


def the_lead_is_killed(rank: int) -> str:
    try:
        with loop_of(rank, make_model()) as loop:
            for number in range(10**6):
                if (rank, number) == (0, 5):
                    os.kill(os.getpid(), signal.SIGKILL)
                loop.step(1.0, 1)
    except TrainingError as error:
        return str(error)
    return "nothing"


def test_the_other_process_of_a_killed_one_ends_with_an_error() -> None:
    first, second = in_processes(2, the_lead_is_killed)
    assert first == "process ended with -9"
    assert second.startswith("the process with the store of torch.distributed has ended")
