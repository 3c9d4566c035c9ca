"""One sender has no vote on how large its own values may be."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from tests.worlds import NUM_PARAMS

from edgegossip.compression.compressor import Compressor, Identity, PerLayer
from edgegossip.compression.sparse import RandomK, TopK
from edgegossip.compression.values import BFloat16, Quantize, Sign
from edgegossip.contract.protocol import Message, Payload
from edgegossip.contract.schema import MessageSpec, TensorSpec
from edgegossip.net.guard.plausibility import FACTOR, MOST, Plausibility

SCHEMA = {
    "params": MessageSpec({"x": torch.zeros(2)}),
    "told": MessageSpec({}, {"1.x": TensorSpec(torch.float32, (2,))}, is_passed_on=True),
    "counts": MessageSpec(
        {"seconds": TensorSpec(torch.float64, (), minimum=0, maximum=1e12)},
        {"labels": TensorSpec(torch.int64, (1,))},
    ),
}


SOUND = torch.ones(2)


def make(
    initial: float = 0.5,
    present: Collection[int] = (1, 2, 3),
    senders: Collection[int] | None = None,
) -> Plausibility:
    """Rank 4 is a server, all others are workers; by default all that are present send."""
    return Plausibility(
        SCHEMA,
        torch.full((2,), initial),
        rank=0,
        present=lambda: present,
        senders=lambda: present if senders is None else senders,
        role=lambda rank: "server" if rank == 4 else "worker",
    )


def of(value: float) -> Payload:
    return {"x": torch.tensor([0.0, -value])}


def is_too_large(plausibility: Plausibility, sender: int, value: float) -> bool:
    return plausibility.excess(sender, "params", {"x": value}) is not None


def is_lie(plausibility: Plausibility, sender: int, value: float) -> bool:
    excess = plausibility.excess(sender, "params", {"x": value})
    return excess is not None and excess.is_lie


def test_one_that_has_not_trained_blames_nobody_before_another_has_spoken() -> None:
    plausibility = make()
    assert is_too_large(plausibility, 1, 1e4)
    assert not is_lie(plausibility, 1, 1e4)
    assert not is_too_large(plausibility, 2, 1e4)
    assert not is_too_large(plausibility, 1, 1e4)


def test_one_that_another_contradicts_lies() -> None:
    plausibility = make()
    assert not is_too_large(plausibility, 2, 1.0)
    assert is_lie(plausibility, 1, 1e4)


def test_ones_first_zeros_contradict_nobody_and_later_ones_do() -> None:
    plausibility = make()
    assert not is_too_large(plausibility, 2, 0.0)
    assert not is_lie(plausibility, 1, 1e4)
    assert not is_too_large(plausibility, 2, 1e4)
    again = make()
    for _ in range(2):
        assert not is_too_large(again, 2, 0.0)
    assert is_lie(again, 1, 1e4)


def test_own_training_shows_what_is_usual() -> None:
    plausibility = make()
    plausibility.went_well(torch.tensor([0.0, -50.0]))
    assert not is_too_large(plausibility, 1, 50 * FACTOR)
    assert is_lie(plausibility, 2, 51 * FACTOR * FACTOR)


def test_the_only_other_worker_is_believed_up_to_a_limit() -> None:
    plausibility = make(present=[1])
    for _ in range(2):  # before and after own training
        assert not is_too_large(plausibility, 1, MOST)
        assert is_lie(plausibility, 1, 3e38)
        plausibility.went_well(SOUND)
    assert plausibility.suspect() == 1


def test_the_only_server_is_believed_before_own_training() -> None:
    plausibility = make(present=[1, 2, 4])
    assert not is_too_large(plausibility, 4, 1e4)
    plausibility.went_well(SOUND)
    assert is_lie(plausibility, 4, 1e4)


def test_the_only_worker_that_sends_is_believed_before_own_training() -> None:
    """On a sparse graph, nobody else would confirm or contradict it."""
    plausibility = make(senders=(1,))
    assert not is_too_large(plausibility, 1, 1e4)
    assert is_lie(plausibility, 1, 2 * MOST)
    plausibility.went_well(SOUND)
    assert is_lie(plausibility, 1, 1e4)
    assert not is_lie(make(senders=(1, 2)), 1, 1e4)


def test_the_first_message_is_held_against_the_initial_parameters() -> None:
    assert not is_too_large(make(), 1, FACTOR)
    assert is_too_large(make(), 1, 1.01 * FACTOR)
    assert not is_too_large(make(initial=20.0), 1, 20 * FACTOR)


def test_what_a_worker_says_itself_is_usual() -> None:
    plausibility = make()
    plausibility.sent(Message("params", 0, of(50.0)))
    assert not is_too_large(plausibility, 1, 50 * FACTOR)
    plausibility.sent(Message("params", 1, of(0.1)))
    assert is_too_large(plausibility, 1, 50 * FACTOR)


def test_nobody_votes_on_itself_and_one_liar_has_no_majority() -> None:
    plausibility = make()
    for _ in range(100):
        assert is_too_large(plausibility, 3, 1e30)
    assert not is_too_large(plausibility, 1, 1.0)
    assert not is_too_large(plausibility, 2, 1.0)
    assert is_too_large(plausibility, 3, 1e30)


def test_others_vouch_for_each_other_where_all_are_larger_than_was_known() -> None:
    """As for a worker that comes back when training has long gone on."""
    plausibility = make()
    assert is_too_large(plausibility, 1, 1e6)
    assert not is_too_large(plausibility, 2, 1e6)
    assert not is_too_large(plausibility, 1, 1e6)


def test_what_has_limits_of_its_own_or_is_no_float_is_not_compared() -> None:
    payload = {"seconds": torch.tensor(1e11).double(), "labels": torch.tensor([10**9])}
    wrong, sizes = SCHEMA["counts"].inspect(payload)
    assert (wrong, sizes) == (None, {"seconds": None, "labels": None})
    assert make().excess(1, "counts", sizes) is None


def test_a_part_is_held_against_what_was_said_before_under_any_rank() -> None:
    assert make().excess(1, "told", {"x": 1e6}) is not None
    assert make().excess(None, "told", {"x": 1.0}) is None


def test_in_an_unknown_name_nobody_votes() -> None:
    plausibility = make()
    for _ in range(5):
        assert plausibility.excess(None, "told", {"x": 1e30}) is not None
    assert plausibility.excess(2, "told", {"x": 1e30}) is not None
    assert plausibility.suspect() is None


def test_who_stood_out_most_is_suspected_until_training_went_well_for_long() -> None:
    plausibility = make()
    for sender, value in ((1, 1.5), (2, 300.0), (3, 900.0)):
        assert not is_too_large(plausibility, sender, value)
    assert plausibility.suspect() == 3
    plausibility.acquit(3)
    assert plausibility.suspect() == 2
    for _ in range(999):
        plausibility.went_well(SOUND)
        assert plausibility.suspect() == 2
    plausibility.went_well(SOUND)
    assert plausibility.suspect() is None


def test_nobody_is_suspected_who_says_what_all_say() -> None:
    plausibility = make()
    for sender in (1, 2, 3):
        assert not is_too_large(plausibility, sender, 1.5)
    assert plausibility.suspect() is None


COMPRESSORS: list[Compressor] = [
    Identity(),
    BFloat16(),
    Sign(),
    Quantize(bits=4),
    TopK(0.3),
    TopK(0.3, Sign()),
    RandomK(0.5, Quantize(bits=2)),
    PerLayer(TopK(0.5, BFloat16()), sizes=(3, NUM_PARAMS - 3)),
]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_what_is_compressed_is_measured_by_what_it_stands_for(compressor: Compressor) -> None:
    ((name, spec),) = compressor.schema(NUM_PARAMS).items()
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 1e30):
        vector = scale * torch.randn(NUM_PARAMS, generator=generator)
        payload = compressor.compress(vector, 0)
        size = spec.magnitude(payload[name])
        assert size is not None
        largest = compressor.decompress(payload, NUM_PARAMS).abs().max().item()
        assert largest * 0.999 <= size <= 2 * vector.abs().max().item()


@pytest.mark.parametrize("compressor", COMPRESSORS[1:], ids=repr)
def test_no_bytes_stand_for_more_than_is_measured(compressor: Compressor) -> None:
    spec = compressor.schema(NUM_PARAMS)["bits"]
    generator = torch.Generator().manual_seed(0)
    assert spec.max_numel is not None
    for length in (0, 1, spec.max_numel - 1, *[spec.max_numel] * 100):
        bits = torch.randint(256, (length,), generator=generator).to(torch.uint8)
        size = spec.magnitude(bits)
        assert size is not None
        largest = compressor.decompress({"bits": bits}, NUM_PARAMS).abs().max().item()
        assert largest <= size * 1.001
