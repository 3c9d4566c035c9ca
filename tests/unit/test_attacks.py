"""Attacks: what poisoned workers send, and that robust mixing limits what it does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import liars
from tests.algorithms import NUM_WORKERS
from tests.tiers import first, thorough
from tests.worlds import EVEN, TARGETS, Recorder, joined, make_world
from torch import Tensor

import edgegossip as eg
from edgegossip.contract.protocol import Message, Send
from edgegossip.contract.robust import TRUST
from edgegossip.data.dataset import FlippedLabels
from edgegossip.sim.attack import Attack, Knowledge
from edgegossip.sim.poisoner import Poisoner
from edgegossip.training.task import Workload

LIAR = 2
HONEST = [rank for rank in range(NUM_WORKERS) if rank != LIAR]
HONEST_MEAN = TARGETS[HONEST].mean(0)
ATTACKS: dict[str, Attack] = {
    "sign-flip": eg.Scaling(by=-1.0),
    "scaling": eg.Scaling(by=10.0),
    "enlarged-flip": eg.Scaling(by=-10.0),
    "negated-model": eg.NegatedModel(),
    "alie": eg.ALIE(),
    "inner-product": eg.InnerProduct(),
    "dissensus": eg.Dissensus(epsilon=3.0),
    "stale": eg.StaleReplay(),
}


def vector(*values: float) -> Tensor:
    return torch.tensor(values)


def known(**others: Any) -> Knowledge:  # noqa: ANN401 - fields of it
    whole: dict[str, Any] = {
        "base": vector(1.0, 1.0),
        "honest": {0: vector(2.0, 2.0), 1: vector(4.0, 2.0)},
        "honest_base": vector(2.0, 2.0),
        "target": vector(0.0, 0.0),
        "heard": {0: vector(2.0, 2.0)},
        "num_liars": 2,
        "first": vector(9.0, 9.0),
    }
    return Knowledge(**{**whole, **others})


@pytest.mark.parametrize(
    ("attack", "sent"),
    [
        (eg.Scaling(by=-1.0), (0.0, -1.0)),
        (eg.Scaling(by=10.0), (11.0, 21.0)),
        (eg.NegatedModel(), (-2.0, -3.0)),
        (eg.FalseWeight(), (2.0, 3.0)),
        (eg.ALIE(deviations=1.0), (3 - 2**0.5, 2.0)),
        (eg.InnerProduct(epsilon=0.5), (1.5, 2.0)),
        (eg.Dissensus(epsilon=1.0), (-1.0, -1.0)),
        (eg.StaleReplay(), (9.0, 9.0)),
    ],
)
def test_each_attack_sends_its_formula(attack: Attack, sent: tuple[float, float]) -> None:
    assert attack.vector(vector(2.0, 3.0), known()).tolist() == pytest.approx(sent)


@pytest.mark.parametrize("attack", [eg.ALIE(), eg.InnerProduct(), eg.Dissensus()])
def test_an_attacker_that_knows_nothing_yet_sends_the_truth(attack: Attack) -> None:
    nothing = known(honest={}, heard={}, honest_base=None)
    assert torch.equal(attack.vector(vector(2.0, 3.0), nothing), vector(2.0, 3.0))


def test_updates_are_scaled_around_zero_and_models_around_the_last_start() -> None:
    poisoner = Poisoner([eg.Poison(rank=0, attack=eg.Scaling(by=-1.0))])
    poisoner.trained(0, vector(1.0, 1.0))

    def sent(name: str, rank: int = 0) -> Tensor:
        send = Send(1, Message("any", 0, {name: vector(2.0, 3.0)}))
        return poisoner.send(0.0, rank, send, vector(0.0, 0.0)).message.payload[name]

    assert sent("params").tolist() == [0.0, -1.0]
    assert sent("update").tolist() == [-2.0, -3.0]
    assert sent("0.values").tolist() == [-2.0, -3.0]
    # What it passes on is signed by its origin, and others send what they like.
    assert sent("3.values").tolist() == [2.0, 3.0]
    assert sent("params", rank=1).tolist() == [2.0, 3.0]


def test_a_poison_acts_in_its_time_only() -> None:
    poison = eg.Poison(rank=0, attack=eg.NegatedModel(), start=1.0, end=2.0)
    send = Send(1, Message("any", 0, {"params": vector(2.0)}))
    signs = [
        Poisoner([poison]).send(now, 0, send, vector(0.0)).message.payload["params"].item()
        for now in (0.5, 1.0, 2.0)
    ]
    assert signs == [2.0, -2.0, 2.0]


def after(attack: Attack | None, algorithm: eg.contract.Algorithm[Any]) -> float:
    """Distance of the honest workers' mean from the mean of their targets."""
    script = () if attack is None else (eg.Poison(rank=LIAR, attack=attack),)
    world = make_world(algorithm, platforms=EVEN, faults=eg.Faults(script=script))
    world.run()
    return float((joined(world.estimates()).mean(0) - HONEST_MEAN).norm())


def gossip(robust: eg.contract.RobustRule | None) -> eg.Gossip:
    return eg.Gossip(topology=eg.complete(NUM_WORKERS), num_rounds=60, robust=robust)


@pytest.mark.parametrize("attack", first(2, ATTACKS))
def test_nearest_neighbors_hold_the_honest_near_their_optimum(attack: str) -> None:
    undefended = after(ATTACKS[attack], gossip(None))
    defended = after(ATTACKS[attack], gossip(eg.NearestNeighbors()))
    honest_spread = float((TARGETS[HONEST] - HONEST_MEAN).norm(dim=1).mean())
    assert defended < honest_spread
    if attack in ("negated-model", "enlarged-flip", "scaling"):
        assert defended < undefended


def test_poisoned_workers_count_in_no_average_even_if_all_are_poisoned() -> None:
    poison = eg.Faults(script=(eg.Poison(rank=LIAR, attack=eg.StaleReplay()),))
    world = make_world(gossip(None), platforms=EVEN, faults=poison)
    assert [*world.estimates()] == HONEST
    script = tuple(eg.FlipLabels(rank=rank) for rank in range(NUM_WORKERS))
    world = make_world(gossip(None), platforms=EVEN, faults=eg.Faults(script=script))
    assert len(world.estimates()) == NUM_WORKERS


def test_notes_name_the_distrusted() -> None:
    recorder = Recorder()
    poison = eg.Faults(script=(eg.Poison(rank=LIAR, attack=eg.Scaling(by=50.0)),))
    world = make_world(
        gossip(eg.NearestNeighbors()), platforms=EVEN, faults=poison, observer=recorder
    )
    world.run()
    notes = [note for _, _, note in recorder.notes if note.kind == TRUST]
    assert len(notes) == 60 * NUM_WORKERS
    shares = [note.numbers[str(LIAR)] for note in notes if str(LIAR) in note.numbers]
    assert sum(shares) / len(shares) < 0.1


@pytest.mark.parametrize("wrapped", [False, True])
def test_gosgd_believes_a_negated_model_with_a_false_weight_unless_clipped(
    wrapped: bool,
) -> None:
    algorithm: Any = eg.GoSGD(
        topology=eg.complete(NUM_WORKERS), num_rounds=100, exchange_probability=0.5
    )
    script = tuple(
        eg.Poison(rank=LIAR, attack=attack)
        for attack in (eg.Scaling(by=1e4), eg.FalseWeight(weight=0.5))
    )
    algorithm = eg.ClippedMessages(inner=algorithm) if wrapped else algorithm
    world = make_world(algorithm, platforms=EVEN, faults=eg.Faults(script=script))
    world.run()
    distance = float((joined(world.estimates()).mean(0) - HONEST_MEAN).norm())
    assert (distance < 5) == wrapped


@pytest.mark.parametrize("make", [eg.ASP, eg.BSP])
def test_a_bounded_server_learns_against_an_enlarged_flip(make: type[eg.ASP]) -> None:
    servers = partial(make, num_workers=NUM_WORKERS - 1, num_rounds=60)
    attack = eg.Scaling(by=-30.0)
    assert after(attack, servers(robust=eg.NormBound())) < 3
    assert not after(attack, servers()) < 30


def test_diloco_stays_equal_under_attack_with_a_rule() -> None:
    algorithm = eg.DiLoCo(
        topology=eg.complete(NUM_WORKERS), num_rounds=40, robust=eg.CoordinateMedian()
    )
    attack = eg.Poison(rank=LIAR, attack=eg.Scaling(by=-30.0))
    world = make_world(algorithm, platforms=EVEN, faults=eg.Faults(script=(attack,)))
    world.run()
    estimates = joined(world.estimates())
    assert all(torch.equal(each, estimates[0]) for each in estimates)
    assert float((estimates[0] - HONEST_MEAN).norm()) < 3
    assert after(eg.Scaling(by=-30.0), replace(algorithm, robust=None)) > 30


@thorough
def test_a_poisoned_run_resumes_as_if_it_had_not_stopped() -> None:
    faults = eg.Faults(script=(eg.Poison(rank=LIAR, attack=eg.StaleReplay()),))
    make = partial(make_world, gossip(eg.TrimmedMean()), platforms=EVEN, faults=faults)
    whole, first, second = make(), make(), make()
    whole.run()
    first.run(until=20.0)
    second.load_state_dict(first.state_dict())
    second.run()
    assert torch.equal(joined(whole.estimates()), joined(second.estimates()))


@thorough
def test_flipped_labels_are_those_of_the_other_end() -> None:
    data = eg.digits()
    flipped = FlippedLabels(data.train, data.num_classes)
    indices = torch.arange(5)
    x, y = data.train.batch(indices)
    false_x, false_y = flipped.batch(indices)
    assert torch.equal(x, false_x)
    assert torch.equal(false_y, 9 - y)
    assert torch.equal(flipped.labels, 9 - data.train.labels)
    assert len(flipped) == len(data.train)


@thorough
def test_a_run_with_flipped_labels_trains_the_others_on_true_ones(tmp_path: Path) -> None:
    def accuracy(script: tuple[Any, ...], name: str) -> float:
        experiment = eg.Experiment(
            task=eg.Task(
                dataset=eg.digits(),
                model=partial(eg.mlp, hidden=(16,), input_shape=(1, 8, 8), num_classes=10),
                batch_size=16,
            ),
            algorithm=eg.Alone(num_rounds=30, local_steps=10),
            platforms=EVEN[:2],
            faults=eg.Faults(script=script),
        )
        results = eg.run(experiment, out=tmp_path / name)
        return results.history[-1].metrics["accuracy"]

    assert accuracy((eg.FlipLabels(rank=1),), "one") > 0.6
    assert accuracy((eg.FlipLabels(rank=0), eg.FlipLabels(rank=1)), "both") < 0.2


def test_labels_cannot_be_flipped_without_classes() -> None:
    data = eg.from_tensors("rows", {"x": torch.rand(8, 2)}, {"x": torch.rand(4, 2)})
    task = eg.Task(
        dataset=data,
        model=lambda: torch.nn.Linear(2, 2),
        forward=lambda model, batch: (model(batch["x"]), batch["x"]),
        loss=torch.nn.functional.mse_loss,
        metrics=(eg.MeanAbsoluteError(),),
    )
    with pytest.raises(ValueError, match="has no classes"):
        Workload(task, [0], 0, flipped={0})


@thorough
@pytest.mark.parametrize("is_robust", [False, True])
def test_hosts_with_a_rule_hold_against_a_negated_model(is_robust: bool) -> None:
    def lie(receiver: int, message: Message) -> Message:
        if message.kind != "params":
            return message
        # Twice, because the network admits it: the values are no larger than usual.
        payload = {name: -2 * tensor for name, tensor in message.payload.items()}
        return replace(message, payload=payload)

    rule = eg.NearestNeighbors() if is_robust else None
    algorithm = eg.Gossip(topology=eg.complete(liars.NUM_WORKERS), num_rounds=12, robust=rule)
    outcome = liars.run(algorithm, lie, seconds=60.0)
    assert outcome.reasons == dict.fromkeys(liars.HONEST, "finished")
    honest = TARGETS[list(liars.HONEST)]
    distance = float((outcome.estimates.mean(0) - honest.mean(0)).norm())
    spread = float((honest - honest.mean(0)).norm(dim=1).mean())
    assert (distance < spread / 2) == is_robust, (distance, spread)
