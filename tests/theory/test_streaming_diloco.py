"""Streaming DiLoCo against its rule: fragments in turn, a round late, and no step is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_ROUNDS, NUM_WORKERS
from tests.tiers import first
from tests.worlds import (
    NUM_PARAMS,
    TARGETS,
    UNEVEN,
    Recorder,
    Watched,
    final_params,
    make_world,
)
from torch import Tensor

from edgegossip.algorithms.gossip.diloco import DiLoCo
from edgegossip.algorithms.gossip.streaming_diloco import StreamingDiLoCo
from edgegossip.compression.compressor import Identity
from edgegossip.compression.values import Quantize
from edgegossip.contract.protocol import Event, Seconds, Trained, WorkerState
from edgegossip.contract.topology import complete

EVERYONE = complete(NUM_WORKERS)


def streaming(**others: Any) -> StreamingDiLoCo:  # noqa: ANN401
    settings: dict[str, Any] = {"topology": EVERYONE, "num_rounds": NUM_ROUNDS}
    settings |= {"local_steps": 3, "num_fragments": 2}
    return StreamingDiLoCo(**{**settings, **others})


def by_the_paper(algorithm: StreamingDiLoCo) -> Tensor:
    """The shared model after the rule's steps, where a training step goes 0.1 of the way."""
    n = algorithm.num_workers
    targets, left = TARGETS[:n], 0.9**algorithm.local_steps
    shared, velocity = torch.zeros(NUM_PARAMS), torch.zeros(NUM_PARAMS)
    local = torch.zeros_like(targets)
    # Each worker owns every n-th entry, and ranges of these are the fragments.
    places = torch.arange(NUM_PARAMS) // n
    for round in range(algorithm.total_rounds):
        trained = local
        if round < algorithm.num_rounds:
            trained = left * local + (1 - left) * targets
        sent = local if algorithm.overlap else trained
        cut = cuts(algorithm.num_fragments, -(-NUM_PARAMS // n))[
            round % algorithm.num_fragments
        ]
        here = (places >= cut.start) & (places < cut.stop)
        mean = (sent - shared)[:, here].mean(0)
        velocity[here] = algorithm.outer_momentum * velocity[here] + mean
        shared[here] += algorithm.outer_lr * (mean + algorithm.outer_momentum * velocity[here])
        local = trained.clone()
        if algorithm.local_share is None:
            local[:, here] = shared[here] + (trained - sent)[:, here]
        else:
            share = algorithm.local_share
            local[:, here] = share * trained[:, here] + (1 - share) * shared[here]
    return shared


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("local_share", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_fragments", [1, 2])
def test_fragments_are_exchanged_by_the_rule(
    overlap: bool, local_share: float | None, num_fragments: int
) -> None:
    algorithm = streaming(
        overlap=overlap,
        local_share=local_share,
        num_fragments=num_fragments,
        outer_momentum=0.6,
        outer_lr=0.8,
    )
    after = final_params(make_world(algorithm, platforms=UNEVEN))
    torch.testing.assert_close(after, by_the_paper(algorithm).expand_as(after))


def test_one_fragment_without_delay_is_diloco() -> None:
    streamed = streaming(num_fragments=1, overlap=False, outer_momentum=0.6, outer_lr=0.8)
    other = DiLoCo(
        topology=EVERYONE,
        num_rounds=NUM_ROUNDS,
        local_steps=3,
        outer_momentum=0.6,
        outer_lr=0.8,
    )
    after = final_params(make_world(streamed, platforms=UNEVEN))
    torch.testing.assert_close(after, final_params(make_world(other)))


@pytest.mark.parametrize("num_fragments", [1, 3])
def test_one_worker_is_local_sgd_with_outer_momentum(num_fragments: int) -> None:
    algorithm = streaming(
        topology=complete(1), num_fragments=num_fragments, overlap=False, outer_momentum=0.6
    )
    after = final_params(make_world(algorithm, platforms=UNEVEN[:1]))[0]
    torch.testing.assert_close(after, by_the_paper(algorithm))
    # torch's own optimizer on each fragment in its turn.
    model = torch.zeros(NUM_PARAMS)
    pieces = [
        torch.zeros(len(range(NUM_PARAMS)[cut]), requires_grad=True)
        for cut in cuts(num_fragments)
    ]
    outers = [torch.optim.SGD([each], 1.0, momentum=0.6, nesterov=True) for each in pieces]
    for round in range(algorithm.total_rounds):
        if round < NUM_ROUNDS:
            model = 0.9**3 * model + (1 - 0.9**3) * TARGETS[0]
        turn = round % num_fragments
        cut, piece = cuts(num_fragments)[turn], pieces[turn]
        piece.grad = piece.detach() - model[cut]
        outers[turn].step()
        model = model.clone()
        model[cut] = piece.detach()
    torch.testing.assert_close(after, torch.cat([each.detach() for each in pieces]))


def cuts(num_fragments: int, size: int = NUM_PARAMS) -> list[slice]:
    bounds = [each * size // num_fragments for each in range(num_fragments + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


@pytest.mark.parametrize("compressor", first(1, [Quantize(4), Identity()]), ids=repr)
def test_no_step_is_lost(compressor: Any) -> None:  # noqa: ANN401
    trained: list[Tensor] = []

    def note(_state: WorkerState, event: Event, _now: Seconds) -> None:
        if isinstance(event, Trained):
            trained.append(event.delta)

    algorithm = streaming(outer_momentum=0.0, compressor=compressor)
    simulator = make_world(Watched(algorithm, after=note), platforms=UNEVEN)
    after = final_params(simulator)
    assert all(torch.equal(each, after[0]) for each in after)
    held_back = torch.zeros(NUM_PARAMS)
    for rank, state in enumerate(simulator.states):
        own = held_back[rank::NUM_WORKERS]
        own += state.held[rank].error[: len(own)]
        held_back += state.error / NUM_WORKERS
    assert len(trained) == NUM_ROUNDS * NUM_WORKERS
    progress = torch.stack(trained).sum(0) / NUM_WORKERS
    torch.testing.assert_close(after[0] + held_back, progress)


def test_messages_have_one_fragment_of_a_chunk() -> None:
    recorder = Recorder()
    algorithm = streaming()
    make_world(algorithm, observer=recorder).run()
    sizes = {
        each.numel() for message, _ in recorder.messages for each in message.payload.values()
    }
    assert sizes == {1}  # of two entries in the largest chunk
    num_exchanges = 2 * (NUM_ROUNDS + 1 + algorithm.num_fragments - 1)
    assert len(recorder.messages) == num_exchanges * NUM_WORKERS * (NUM_WORKERS - 1)


def test_a_model_with_too_few_entries_for_the_fragments_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_fragments must be in \[1, 2\].*got 3"):
        streaming(num_fragments=3).init(0, torch.zeros(NUM_PARAMS))
