"""Promises of Async Local-SGD and FedBuff: their boxes, limit cases, blocks by speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_WORKERS
from tests.worlds import EVEN, NUM_PARAMS, TARGETS, UNEVEN, Watched, joined, make_world
from torch import Tensor

from edgegossip.algorithms.server.async_local_sgd import (
    AsyncLocalSGD,
    FedBuff,
    MomentumServerState,
)
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.halos import HALoS
from edgegossip.algorithms.server.heloco import HeLoCo
from edgegossip.algorithms.server.methods import ASP
from edgegossip.algorithms.server.outer_server import OuterServer, largest_credible
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.wrappers.batch_tune import BatchTune
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.contract.protocol import (
    Event,
    Message,
    Received,
    Seconds,
    Send,
    Started,
    Steps,
    Train,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.randomness import generator
from edgegossip.sim.fault import Crash, Faults, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform
from edgegossip.training.quadratic import QuadraticTrainer

NUM = NUM_WORKERS - 1
LINKS = Links(default=Link(latency=0.25))
PROGRESS = torch.randn(9, 3, generator=generator(0, "progress"))


def final_model(algorithm: ParameterServer, **options: Any) -> Tensor:  # noqa: ANN401
    world = make_world(algorithm, links=LINKS, **options)
    assert world.run()
    params: Tensor = world.states[0].params
    return params


def commit(
    update: Tensor, number: int, *, version: int = 0, speed: float = 1.0, num_trained: int = 3
) -> Message:
    numbers = {
        "number": number,
        "num_steps": 1,
        "num_trained": num_trained,
        "version": version,
        "pace": speed,
    }
    return Message("commit", 0, {"update": update}, numbers)


def feed(algorithm: ParameterServer, state: Any, rank: int, message: Message) -> Message:  # noqa: ANN401
    """Give the server a commit; return its answer."""
    effects = algorithm.handle(state, Received(rank, message), 1.0)
    (answer,) = [effect.message for effect in effects if isinstance(effect, Send)]
    return answer


def test_without_momentum_and_with_one_step_it_is_asp() -> None:
    settings: dict[str, Any] = {"num_workers": NUM, "num_rounds": 9}
    ours = AsyncLocalSGD(**settings, local_steps=1, buffer_size=1, outer_momentum=0.0)
    expected = final_model(ASP(**settings), platforms=UNEVEN)
    assert torch.equal(final_model(ours, platforms=UNEVEN), expected)


@pytest.mark.parametrize("look_ahead", [0.0, 0.5])
def test_one_worker_takes_nesterov_steps_on_blocks(look_ahead: float) -> None:
    algorithm = AsyncLocalSGD(
        num_workers=1,
        num_rounds=6,
        local_steps=4,
        outer_lr=0.8,
        outer_momentum=0.6,
        look_ahead=look_ahead,
    )
    trainer = QuadraticTrainer(TARGETS[1], 0.1)
    model = torch.zeros(NUM_PARAMS, requires_grad=True)
    outer = torch.optim.SGD([model], lr=0.8, momentum=0.6, nesterov=True)
    start = model.detach().clone()
    for _ in range(6):
        end = trainer.train(Train(start, Steps(4))).params
        model.grad = start - end
        outer.step()
        velocity = -outer.state[model]["momentum_buffer"]
        start = model.detach() + look_ahead * 0.8 * 0.6 * velocity
    world = make_world(algorithm, platforms=EVEN[:2])
    assert world.run()
    torch.testing.assert_close(world.states[0].params, start)
    # The look-ahead is for workers; the model itself is evaluated.
    torch.testing.assert_close(world.states[0].estimate, model.detach())


@pytest.mark.parametrize("activation", [0.0, 0.1, 1 / 3])
def test_the_server_follows_the_box_of_the_paper(activation: float) -> None:
    size, beta, c, alpha = 3, 0.7, activation, 0.9
    algorithm = AsyncLocalSGD(
        num_workers=2,
        num_rounds=99,
        outer_lr=alpha,
        outer_momentum=beta,
        buffer_size=size,
        activation=c,
    )
    state = algorithm.init(0, torch.ones(3))
    theta, momentum, delta, lr = torch.ones(3), torch.zeros(3), torch.zeros(3), alpha * size / 2
    for t, update in enumerate(PROGRESS):
        g = -update
        delta = delta + g
        if (t + 1) % size == 0:
            momentum = beta * momentum + delta / size
            theta = theta - lr * ((1 - c * size + c) * beta * momentum + g / size)
            delta = torch.zeros(3)
        else:
            theta = theta - lr * (c * beta * momentum + g / size)
        answer = feed(algorithm, state, 1 + t % 2, commit(update, 1 + t // 2))
        torch.testing.assert_close(answer.payload["params"], theta)


def test_workers_start_where_the_momentum_will_lead() -> None:
    algorithm = AsyncLocalSGD(
        num_workers=1, num_rounds=9, outer_lr=0.5, outer_momentum=0.8, look_ahead=1.0
    )
    state: Any = algorithm.init(0, torch.zeros(3))
    answer = feed(algorithm, state, 1, commit(PROGRESS[0], 1))
    # What a commit without progress will do with a momentum that does not decay.
    led = state.model + 0.5 * 0.8 * state.velocity
    torch.testing.assert_close(answer.payload["params"], led)
    torch.testing.assert_close(state.model, 0.5 * (1 + 0.8) * PROGRESS[0])


@pytest.mark.parametrize("speeds", ["measured", "forecast", "equal"])
def test_slow_workers_take_fewer_steps_and_commit_as_often(speeds: str) -> None:
    throughputs = [1.0, 8.0, 8.0, 4.0, 1.0]
    platforms = [Platform(throughput=each) for each in throughputs]
    algorithm = AsyncLocalSGD(num_workers=NUM, num_rounds=100, local_steps=16, speeds=speeds)
    world = make_world(algorithm, platforms=platforms, links=Links(default=Link(latency=0.01)))
    world.run(until=102.0)
    state = world.states[0]
    blocks = [world.states[rank].local_steps for rank in (1, 2, 3, 4)]
    commits = [*state.num_commits.values()]
    if speeds == "equal":
        assert blocks == [16, 16, 16, 16]
        assert commits == [50, 50, 25, 6]
    else:
        assert blocks == [16, 16, 8, 2]
        # The first block has 16 steps everywhere; a forecast arrives a commit later.
        assert commits == [50, 50, 48 if speeds == "forecast" else 49, 43]


@pytest.mark.parametrize(
    ("wrap", "num_servers"), [(Standby, 1), (partial(Shards, num_servers=2), 2)]
)
def test_the_look_ahead_is_not_evaluated_by_wrappers_either(
    wrap: Callable[..., Any], num_servers: int
) -> None:
    num_workers = NUM_WORKERS - num_servers
    inner = AsyncLocalSGD(num_workers=num_workers, num_rounds=5, local_steps=2, look_ahead=1.0)
    world = make_world(wrap(inner=inner), links=LINKS)
    assert world.run()
    servers = [getattr(s, "server", None) or getattr(s, "inner", None) for s in world.states]
    models = [s.model for s in servers if isinstance(s, MomentumServerState)]
    assert torch.equal(joined(world.estimates()).flatten(), torch.cat(models))


@pytest.mark.parametrize("inner", [AsyncLocalSGD, DecoupledDiLoCo])
def test_batches_may_have_sizes_by_speed(inner: Callable[..., Any]) -> None:
    algorithm = BatchTune(inner=inner(num_workers=NUM, num_rounds=5, local_steps=2))
    world = make_world(algorithm, platforms=UNEVEN, links=LINKS)
    assert world.run()
    assert len({state.batch_ratio for state in world.states[1:]}) > 1


def test_a_fast_worker_that_is_lost_keeps_no_blocks_short() -> None:
    algorithm = AsyncLocalSGD(num_workers=2, num_rounds=9)
    state = algorithm.init(0, torch.zeros(3))
    feed(algorithm, state, 1, commit(PROGRESS[0], 1, speed=8.0))
    assert feed(algorithm, state, 2, commit(PROGRESS[1], 1)).numbers == {"fastest": 8.0}
    algorithm.handle(state, WorkerLost(1), 2.0)
    assert feed(algorithm, state, 2, commit(PROGRESS[1], 2)).numbers == {"fastest": 1.0}


SERVED: dict[str, Any] = {"num_workers": NUM, "num_rounds": 999, "local_steps": 32}
WITH_SPEEDS = [
    AsyncLocalSGD(**SERVED),
    AsyncLocalSGD(**SERVED, speeds="forecast"),
    FedBuff(**SERVED, speeds="measured"),
    HeLoCo(**SERVED),
    DecoupledDiLoCo(**SERVED),
    # All in one region.
    HALoS(regions=(0, 0, 0), num_rounds=999, local_steps=32),
]


@pytest.mark.parametrize("algorithm", WITH_SPEEDS, ids=lambda each: type(each).__name__)
def test_a_liar_cannot_make_all_others_blocks_a_single_step(
    algorithm: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blocks() -> list[int]:
        world = make_world(algorithm, links=LINKS)
        world.run(until=300.0)
        kept = [getattr(state, "local", state) for state in world.states]
        # The last two workers are honest, and as fast as all others.
        return [state.local_steps for state in kept[-2:]]

    assert blocks() == [32, 32]
    told = OuterServer.commit_numbers

    def boasted(server: OuterServer, state: Any) -> Any:  # noqa: ANN401
        return {"pace": 1e12} if state.rank == 1 else told(server, state)

    monkeypatch.setattr(OuterServer, "commit_numbers", boasted)
    assert blocks() == [4, 4]


def test_a_machine_up_to_eight_times_as_fast_as_all_others_is_believed() -> None:
    assert largest_credible([1.0, 8.0, 1.0]) == 8.0
    assert largest_credible([1.0, 9.0, 1.0, 0.5]) == 8.0
    assert largest_credible([0.0, 9.0]) == 9.0  # nobody else has said anything yet
    assert largest_credible([0.0]) == largest_credible([]) == 0.0


def test_statistics_move_as_measured_and_have_no_momentum() -> None:
    algorithm = AsyncLocalSGD(num_workers=2, num_rounds=9, buffer_size=1, outer_lr=3.0)
    state: Any = algorithm.init(0, torch.ones(3))
    for number in (1, 2):
        # A commit has the statistics themselves, here 5, and not their change.
        update = torch.tensor([0.5, 5.0, 5.0])
        feed(algorithm, state, 1, commit(update, number, num_trained=1))
    assert state.params[1:].tolist() == [4.0, 4.0]  # half of the way from 1, twice
    assert state.velocity[1:].tolist() == [0.0, 0.0]
    assert state.velocity[0] > 0


def test_a_restarted_server_goes_on_without_momentum() -> None:
    seen: list[tuple[float, bool]] = []

    def look(state: WorkerState, event: Event, now: Seconds) -> None:
        if isinstance(state, MomentumServerState) and isinstance(event, Started | Received):
            seen.append((float(state.velocity.norm()), state.is_new))
            if not state.is_new and state.velocity.norm() == 0:
                assert torch.equal(state.model, state.params)

    algorithm = AsyncLocalSGD(num_workers=NUM, num_rounds=20, local_steps=2, look_ahead=1.0)
    faults = Faults(script=(Crash(at=9.3, rank=0), Recover(at=9.9, rank=0)), detection_time=0.2)
    world = make_world(
        Watched(algorithm, after=look), platforms=UNEVEN, links=LINKS, faults=faults
    )
    world.run(until=9.2)
    before = world.states[0].params
    assert seen[-1][0] > 0
    assert world.run()
    begins = next(i for i, (_, is_new) in enumerate(seen) if is_new)
    goes_on = next(norm for norm, is_new in seen[begins:] if not is_new)
    assert goes_on == 0
    assert not torch.equal(before, world.states[0].params)
    assert set(world.states[0].rounds.values()) == {20}


# FedBuff.


def test_fedbuff_changes_the_model_with_every_full_buffer() -> None:
    algorithm = FedBuff(
        num_workers=2, num_rounds=99, outer_lr=0.6, buffer_size=3, staleness_power=0.0
    )
    state, model = algorithm.init(0, torch.ones(3)), torch.ones(3)
    for t, update in enumerate(PROGRESS):
        answer = feed(algorithm, state, 1 + t % 2, commit(update, 1 + t // 2))
        if t % 3 == 2:
            model = model + 0.6 * PROGRESS[t - 2 : t + 1].mean(0)
        torch.testing.assert_close(answer.payload["params"], model)
        assert int(answer.payload["counts"].sum()) == t + 1


def test_fedbuff_gives_stale_commits_less_weight() -> None:
    algorithm = FedBuff(num_workers=1, num_rounds=99, buffer_size=2)
    state = algorithm.init(0, torch.zeros(3))
    for number in range(1, 7):
        feed(algorithm, state, 1, commit(torch.zeros(3), number, version=number - 1))
    # The model has changed three times since version 0, and twice since version 3.
    feed(algorithm, state, 1, commit(torch.tensor([1.0, 0.0, 0.0]), 7, version=0))
    feed(algorithm, state, 1, commit(torch.tensor([0.0, 1.0, 0.0]), 8, version=3))
    expected = torch.tensor([1 / 4**0.5, 1 / 3**0.5, 0.0]) / 2
    torch.testing.assert_close(state.params, expected)


def test_fedbuff_with_a_buffer_of_one_is_asp() -> None:
    settings: dict[str, Any] = {"num_workers": NUM, "num_rounds": 9}
    ours = FedBuff(
        **settings, local_steps=1, buffer_size=1, outer_lr=1 / NUM, staleness_power=0.0
    )
    expected = final_model(ASP(**settings), platforms=UNEVEN)
    torch.testing.assert_close(final_model(ours, platforms=UNEVEN), expected)


def test_fedbuff_loses_no_commit_at_the_end() -> None:
    plain = FedBuff(num_workers=NUM, num_rounds=5, local_steps=1, staleness_power=0.0)
    full = replace(plain, buffer_size=20, outer_lr=20.0)
    left = replace(plain, buffer_size=50, outer_lr=50.0)
    # No commit changes the model before the last one, so both add up the same changes.
    torch.testing.assert_close(final_model(left), final_model(full))
    assert final_model(left).norm() > 0
