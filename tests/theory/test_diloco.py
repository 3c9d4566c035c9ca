"""DiLoCo against its theory: one model for all, moved by momentum, whatever the graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.agreement import distances, outer_sgd
from tests.algorithms import MATCHINGS, NUM_ROUNDS, NUM_WORKERS
from tests.observers import Silent
from tests.tiers import first, thorough
from tests.trained import trained_event
from tests.worlds import (
    EVEN,
    TARGETS,
    UNEVEN,
    Watched,
    final_params,
    make_world,
)
from torch import Tensor

from edgegossip.algorithms.gossip.all_reduce import AllReduce
from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.compression.sparse import TopK
from edgegossip.compression.values import Quantize
from edgegossip.contract.protocol import (
    Event,
    Layout,
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    Started,
    Train,
    Trained,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.topology import (
    Topology,
    complete,
    directed_ring,
    intermittent,
    one_peer_exponential,
    random_one_peer,
    ring,
    star,
)
from edgegossip.sim.fault import Crash, Drop, Fault, Faults, Partition, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform

GRAPHS = [
    complete(NUM_WORKERS),
    directed_ring(NUM_WORKERS),
    one_peer_exponential(NUM_WORKERS),
    MATCHINGS,
    random_one_peer(NUM_WORKERS, period=7, seed=0),
    intermittent(ring(NUM_WORKERS), availability=0.5, period=5, seed=0),
]
on_each_graph = pytest.mark.parametrize("topology", GRAPHS, ids=repr)
COMPRESSED: dict[str, Any] = {"compressor": TopK(0.4, Quantize(2)), "repair_rounds": 2}


def diloco(topology: Topology, **others: Any) -> DiLoCo:  # noqa: ANN401
    return DiLoCo(topology=topology, num_rounds=NUM_ROUNDS, local_steps=3, **others)


@on_each_graph
def test_without_momentum_a_round_averages_exactly(topology: Topology) -> None:
    exact = AllReduce(topology=complete(NUM_WORKERS), num_rounds=NUM_ROUNDS, local_steps=3)
    after = final_params(make_world(diloco(topology, outer_momentum=0.0)))
    torch.testing.assert_close(after, final_params(make_world(exact)))


def test_outer_step_is_that_of_sgd_with_nesterovs_momentum() -> None:
    after = final_params(
        make_world(diloco(directed_ring(NUM_WORKERS), outer_momentum=0.6, outer_lr=0.8))
    )
    expected = outer_sgd(NUM_ROUNDS, local_steps=3, lr=0.8, momentum=0.6)
    torch.testing.assert_close(after, expected.expand_as(after))


@on_each_graph
def test_all_have_the_same_model_to_the_last_bit(topology: Topology) -> None:
    simulator = make_world(diloco(topology, **COMPRESSED), platforms=UNEVEN)
    after = final_params(simulator)
    assert after[0].norm() > 0
    assert all(torch.equal(each, after[0]) for each in after)
    velocities = [state.velocity for state in simulator.states]
    assert all(torch.equal(each, velocities[0]) for each in velocities)


def test_what_compressing_holds_back_is_all_that_is_missing() -> None:
    trained: list[Tensor] = []

    def note(_state: WorkerState, event: Event, _now: Seconds) -> None:
        if isinstance(event, Trained):
            trained.append(event.delta)

    algorithm = diloco(directed_ring(NUM_WORKERS), outer_momentum=0.0, **COMPRESSED)
    simulator = make_world(Watched(algorithm, after=note))
    after = final_params(simulator)
    held_back = torch.stack([state.error for state in simulator.states])
    assert held_back.norm() > 0.01
    torch.testing.assert_close(after.sum(0) + held_back.sum(0), torch.stack(trained).sum(0))


def test_training_goes_on_from_what_was_held_back() -> None:
    algorithm = diloco(complete(1), compressor=TopK(0.4))
    state = algorithm.init(0, torch.zeros(5))
    algorithm.handle(state, Started(), 0.0)
    after = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    [train] = algorithm.handle(state, trained(torch.zeros(5), after), 0.0)
    assert isinstance(train, Train)
    moved = 1 + algorithm.outer_momentum
    torch.testing.assert_close(state.params, torch.tensor([0.0, 0.0, 0.0, 4.0, 5.0]) * moved)
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0 * moved, 5.0 * moved])
    torch.testing.assert_close(train.params, expected)


@dataclass
class LinkCounts(Silent):
    """Counts whose updates went over each link in each exchange, and the parts of models."""

    algorithm: DiLoCo
    passed: Counter[tuple[Rank, Rank, Rank, int]] = field(default_factory=Counter)
    num_parts: int = 0

    def sent(
        self,
        now: Seconds,
        rank: Rank,
        receiver: Rank,
        message: Message,
        *others: Any,  # noqa: ANN401
    ) -> None:
        exchange = self.algorithm.exchange_of(message)
        for name in message.payload:
            origin, _, what = name.partition(".")
            self.num_parts += what == "part"
            if what == "bits":
                self.passed[rank, receiver, int(origin), exchange] += 1


def test_update_goes_once_over_each_link_of_a_directed_ring() -> None:
    algorithm = diloco(directed_ring(NUM_WORKERS), **COMPRESSED)
    links = LinkCounts(algorithm)
    final_params(make_world(algorithm, observer=links))
    assert set(links.passed.values()) == {1}
    # Over all links of the ring but the one that leads back to where it comes from.
    assert len(links.passed) == NUM_ROUNDS * NUM_WORKERS * (NUM_WORKERS - 1)
    assert links.num_parts == 0


@on_each_graph
def test_nobody_is_told_what_it_told_or_made(topology: Topology) -> None:
    algorithm = diloco(topology, **COMPRESSED)
    links = LinkCounts(algorithm)
    final_params(make_world(algorithm, observer=links))
    length = topology.flooding_time
    for sender, receiver, origin, exchange in links.passed:
        assert receiver != origin
        earlier = range(exchange // length * length, exchange)
        assert not any((receiver, sender, origin, each) in links.passed for each in earlier)


def test_who_hears_of_a_repair_only_now_meets_the_others_half_way() -> None:
    algorithm = DiLoCo(topology=complete(2), num_rounds=9, repair_rounds=1, outer_momentum=0.0)
    state = algorithm.init(0, torch.zeros(3))
    algorithm.handle(state, Started(), 0.0)
    algorithm.handle(state, trained(torch.zeros(3), torch.zeros(3)), 0.0)
    shared = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    update = {"1.values": torch.zeros(3), "1.part": shared, "1.until": torch.tensor(4)}
    algorithm.handle(state, Received(1, Message("params", 0, update)), 0.0)
    assert state.params.tolist() == [0.5, 1.0, 1.5]
    assert state.repairs_until == 4


SLOW = Links(default=Link(bandwidth=100.0))  # a message takes seconds
CUT = Partition(start=30.0, end=60.0, group=(0, 1))
LOST_FOR_A_WHILE = (Crash(at=13.0, rank=2), Recover(at=24.0, rank=2))
RESTARTED_WITHIN_ITS_ROUND = (Crash(at=17.0, rank=2), Recover(at=17.01, rank=2))


@thorough
@pytest.mark.parametrize(
    ("topology", "links", "script"),
    first(
        2,
        [
            (directed_ring(4), None, (Drop(probability=0.3, end=30.0),)),
            (directed_ring(4), None, LOST_FOR_A_WHILE),
            (complete(4), None, RESTARTED_WITHIN_ITS_ROUND),
            (complete(4), None, (CUT,)),
            (ring(4), None, (CUT,)),
            (complete(4), SLOW, (Crash(at=10.2, rank=3),)),
        ],
    ),
    ids=[
        "messages lost",
        "lost for a while",
        "restarted",
        "cut",
        "cut ring",
        "lost in sending",
    ],
)
@pytest.mark.parametrize(
    "platforms",
    [
        pytest.param(UNEVEN[:4], id="uneven"),
        pytest.param(EVEN[:4], id="even", marks=pytest.mark.slow),
    ],
)
def test_workers_that_have_come_to_differ_agree_again(
    platforms: tuple[Platform, ...],
    topology: Topology,
    links: Links | None,
    script: tuple[Fault, ...],
) -> None:
    algorithm = DiLoCo(
        topology=topology, num_rounds=40, local_steps=2, timeout=20.0, **COMPRESSED
    )
    found = distances(algorithm, platforms, script, links)
    assert max(found) > 0.1
    assert found[-1] == 0.0


@pytest.mark.parametrize("topology", [complete(4), ring(4)], ids=repr)
@pytest.mark.parametrize("num_left", [1, 2, 10])
def test_workers_agree_however_few_rounds_are_left_after_a_cut(
    topology: Topology, num_left: int
) -> None:
    # A round takes two seconds; the one in which they meet again counts.
    end = 2.0 * (40 - num_left) + 0.5
    cut = Partition(start=30.0, end=end, group=(0, 1))
    algorithm = DiLoCo(topology=topology, num_rounds=40, local_steps=2, timeout=20.0)
    assert algorithm.repair_rounds > 40
    found = distances(algorithm, EVEN[:4], (cut,))
    assert max(found) > 0.1
    assert found[-1] == 0.0


def sent_in_the_last_round(*events: Event) -> dict[str, Tensor]:
    """The payload from worker 0 to worker 1 in the last round, after these events."""
    algorithm = DiLoCo(topology=complete(3), num_rounds=2)
    state = algorithm.init(0, torch.zeros(4))
    effects = algorithm.handle(state, Started(), 0.0)
    for event in (
        trained(torch.zeros(4), torch.ones(4)),
        *(update_of(sender) for sender in (1, 2)),
        *events,
        trained(torch.zeros(4), torch.ones(4)),
    ):
        effects = algorithm.handle(state, event, 0.0)
    send = next(each for each in effects if isinstance(each, Send) and each.receiver == 1)
    assert send.message.round == 1
    return dict(send.message.payload)


def update_of(sender: Rank) -> Received:
    return Received(sender, Message("params", 0, {f"{sender}.values": torch.zeros(4)}))


def test_in_the_last_round_a_repair_begins_at_once_and_with_the_whole_model() -> None:
    assert sent_in_the_last_round().keys() == {"0.values"}
    repairing = sent_in_the_last_round(WorkerLost(2))
    assert repairing.keys() == {"0.values", "0.part", "0.until"}
    assert repairing["0.part"].shape == (2, 4)


@thorough
@pytest.mark.parametrize(("repair_rounds", "farthest"), first(1, [(2, 0.25), (64, 1.0)]))
def test_models_stay_near_each_other_where_not_all_hear_of_all(
    repair_rounds: int, farthest: float
) -> None:
    # Without worker 3 the others stand in a row, and 4 exchanges do not lead to its ends.
    algorithm = DiLoCo(
        topology=ring(8), num_rounds=150, local_steps=2, repair_rounds=repair_rounds
    )
    faults = Faults(script=(Crash(at=10.0, rank=3),))
    simulator = make_world(algorithm, platforms=EVEN[:1] * 8, faults=faults)
    assert simulator.run()
    models = torch.stack([*simulator.estimates().values()])
    assert 0.0 < (models - models.mean(0)).norm() < farthest * TARGETS[:8].norm()


def test_statistics_have_no_momentum_where_a_worker_has_not_trained_yet() -> None:
    algorithm = DiLoCo(topology=ring(4), num_rounds=9)
    state = algorithm.init(0, torch.zeros(2))
    started = Started(has_rejoined=True, layout=Layout(num_trained=1))
    algorithm.handle(state, started, 0.0)
    for sender in (1, 3):
        model = {"params": torch.tensor([0.0, 1.0])}
        algorithm.handle(state, Received(sender, algorithm.message("catch-up", 1, model)), 0.0)
    for sender in (1, 3):
        update = {f"{sender}.values": torch.tensor([0.0, -0.9])}
        algorithm.handle(state, Received(sender, algorithm.message("params", 1, update)), 0.0)
    assert (state.round, state.exchange) == (1, 2)
    torch.testing.assert_close(state.params, torch.tensor([0.0, 0.1]))


def test_running_statistics_are_averaged_without_momentum() -> None:
    algorithm = DiLoCo(topology=complete(1), num_rounds=3)
    state = algorithm.init(0, torch.zeros(3))
    algorithm.handle(state, Started(layout=Layout(num_trained=2)), 0.0)
    for _ in range(2):
        after = state.params + torch.tensor([1.0, 1.0, 1.0])
        algorithm.handle(state, trained(state.params, after), 0.0)
    # With 0.7: 1 + 0.7, and then 1 + 0.7 * (1 + 0.7) more.
    torch.testing.assert_close(state.params, torch.tensor([3.89, 3.89, 2.0]))


def trained(before: Tensor, after: Tensor) -> Trained:
    return trained_event(after, before)


def test_one_that_had_to_go_back_says_so_and_the_models_agree_again() -> None:
    algorithm = DiLoCo(
        topology=complete(NUM_WORKERS), num_rounds=16, local_steps=1, repair_rounds=2
    )
    world = make_world(algorithm)
    world.run(until=3.5)
    went_back = world.states[1]
    good = went_back.params.clone()
    algorithm.learn(went_back, trained_event(good, good, num_steps=0, has_gone_back=True))
    assert torch.equal(went_back.params, good)
    assert went_back.has_missed
    assert not went_back.velocity.any()
    world.run()
    models = [state.params for state in world.states]
    assert max(float((model - models[0]).abs().max()) for model in models) < 1e-5


def test_flooding_takes_as_long_as_the_longest_way() -> None:
    assert [each.flooding_time for each in (ring(8), star(6), directed_ring(9))] == [4, 2, 8]
    # Worker 0 hears of worker 4 over (3, 4), (2, 3), (1, 2), (0, 1), which take turns.
    assert MATCHINGS.flooding_time == 5


@pytest.mark.parametrize(
    "update",
    [
        {"part": torch.ones(2, 1), "until": torch.tensor(4)},
        {"values": torch.ones(3), "part": torch.ones(2, 1)},
        {"values": torch.ones(3), "until": torch.tensor(4)},
        {"values": torch.ones(3), "part": torch.ones(2, 2), "until": torch.tensor(4)},
    ],
    ids=["no values", "no end", "no part", "too long"],
)
def test_update_that_is_not_whole_counts_for_nothing(update: dict[str, Tensor]) -> None:
    algorithm = DiLoCo(topology=complete(2), num_rounds=9, repair_rounds=3, timeout=1.0)
    message = {f"1.{name}": tensor for name, tensor in update.items()}
    schema = algorithm.schema(torch.zeros(3))["params"]
    assert schema.mismatch(message) is None
    assert schema.bad_values(message) is None
    state = algorithm.init(0, torch.zeros(3))
    algorithm.handle(state, Started(), 0.0)
    algorithm.handle(state, Received(1, Message("params", 0, message)), 0.0)
    algorithm.handle(state, trained(torch.zeros(3), torch.zeros(3)), 0.0)
    assert state.round == 1
    assert state.params.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("local_steps", 0, "at least 1"),
        ("repair_rounds", 0, "at least 1"),
        ("outer_momentum", 1.0, r"in \[0, 1\)"),
        ("outer_lr", 0.0, "above 0"),
    ],
)
def test_bad_numbers_are_refused(name: str, value: float, allowed: str) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"{name} must be {allowed}, got {value}"):
        DiLoCo(topology=ring(3), num_rounds=1, **wrong)


def test_all_exchanges_of_a_round_but_the_first_say_which_they_are() -> None:
    algorithm = DiLoCo(topology=ring(8), num_rounds=2)
    places = range(1, algorithm.exchanges_per_round)
    assert len(places) > 1
    assert algorithm.exchanged({}).optional_numbers == {"exchange": places}
