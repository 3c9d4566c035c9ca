"""Training in stages, one worker at a time: who says what to whom, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.effects import of_type
from tests.trained import trained_event
from tests.worlds import require_bounded
from torch import Tensor

from edgegossip.algorithms.alone import Alone
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gossip import Gossip
from edgegossip.algorithms.parameter_server.asp import ASP
from edgegossip.algorithms.stages.decoupled import Decoupled
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.stage_state import StageState
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.stages.wire import LARGEST, Precision
from edgegossip.core.algorithm import Setting
from edgegossip.core.errors import LocalProtocolError, ServerLostError
from edgegossip.core.protocol import (
    Effect,
    Epochs,
    Event,
    Finish,
    Message,
    Payload,
    Rank,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.core.topology import complete

PARAMS = torch.zeros(4)
SHAPE = (3,)
SETTINGS: dict[str, Any] = {"boundaries": (SHAPE, SHAPE), "num_classes": 5, "max_batch": 4}
ALONE = Alone(num_rounds=100, local_steps=10)
FIRST, MIDDLE, LAST = 0, 1, 2


def decoupled(**changes: Any) -> Decoupled:  # noqa: ANN401
    return Decoupled(**{"inner": ALONE, **SETTINGS, **changes})


def pipelined(**changes: Any) -> Pipelined:  # noqa: ANN401
    return Pipelined(**{"inner": ALONE, **SETTINGS, **changes})


BOTH = {"decoupled": decoupled(), "pipelined": pipelined()}
each_algorithm = pytest.mark.parametrize("algorithm", BOTH.values(), ids=BOTH)


class Worker:
    """One worker of a run, told what happens by hand."""

    def __init__(self, algorithm: Stages, rank: Rank) -> None:
        self.algorithm, self.rank = algorithm, rank
        self.state: StageState = algorithm.init(rank, PARAMS)
        self.effects: list[Effect] = []

    def tell(self, event: Event, now: Seconds = 0.0) -> list[Effect]:
        self.effects = self.algorithm.handle(self.state, event, now)
        return self.effects

    def start(self, now: Seconds = 0.0) -> list[Effect]:
        return self.tell(Started(num_samples=40, epoch_cost=40.0), now)

    def hear(self, sender: Rank, message: Message, now: Seconds = 0.0) -> list[Effect]:
        return self.tell(Received(sender, message), now)

    @property
    def request(self) -> Train:
        """The batch that it trains on now."""
        (request,) = of_type(self.effects, Train)
        return request

    @property
    def sent(self) -> Message:
        """The one message that it has sent now."""
        (send,) = of_type(self.effects, Send)
        return send.message

    def train(
        self, outputs: Payload | None = None, now: Seconds = 1.0, **more: Tensor
    ) -> list[Effect]:
        """Be done with what it trains on."""
        outputs = {**(outputs or {}), **more}
        num_samples = 2 if self.rank == FIRST else 0
        return self.tell(
            trained_event(PARAMS + now, PARAMS, outputs=outputs, num_samples=num_samples), now
        )


def batch(value: float = 1.0, num_samples: int = 2) -> dict[str, Tensor]:
    labels = torch.zeros(num_samples, dtype=torch.int64)
    return {"activations": torch.full((num_samples, *SHAPE), value), "labels": labels}


def up(number: int, value: float = 1.0, boundary: int = 0, round: int = 0) -> Message:
    numbers = {"batch": number, "wants_gradient": 1}
    return Message(f"activations-{boundary}", round, batch(value), numbers)


def down(
    number: int, gradient: Tensor | None = None, boundary: int = 0, round: int = 0
) -> Message:
    payload = {} if gradient is None else {"gradient": gradient}
    return Message(f"done-{boundary}", round, payload, {"batch": number})


def gradient(value: float = 0.5, num_samples: int = 2) -> Tensor:
    return torch.full((num_samples, *SHAPE), value)


# Alone.


def test_one_alone_trains_its_rounds_and_says_nothing() -> None:
    algorithm = Alone(num_rounds=2, local_steps=3)
    state = algorithm.init(0, PARAMS)
    (request,) = algorithm.handle(state, Started(num_samples=4), 0.0)
    assert isinstance(request, Train)
    assert request.work.num_steps == 3  # type: ignore[union-attr]
    (request,) = algorithm.handle(state, trained_event(PARAMS + 1, PARAMS), 1.0)
    assert isinstance(request, Train)
    assert torch.equal(request.params, PARAMS + 1)
    assert algorithm.handle(state, WorkerLost(1), 1.0) == []
    assert algorithm.handle(state, trained_event(PARAMS + 2, PARAMS), 2.0) == [Finish()]
    assert state.round == 2
    assert algorithm.schema(PARAMS) == {}


@pytest.mark.parametrize("name", ["num_rounds", "local_steps"])
def test_one_alone_needs_something_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        Alone(**{"num_rounds": 1, name: 0})


# Who is who.


def test_ranks_hold_stages_in_order() -> None:
    algorithm = decoupled(inner=Gossip(topology=complete(3), num_rounds=2), num_first=3)
    assert algorithm.num_workers == 5
    assert [algorithm.stage(rank) for rank in range(5)] == [0, 0, 0, 1, 2]
    assert [algorithm.above(rank) for rank in range(5)] == [3, 3, 3, 4, None]
    roles = [algorithm.role(rank) for rank in range(5)]
    assert [role.name for role in roles] == ["stage-0"] * 3 + ["stage-1", "stage-2"]
    assert [role.has_data for role in roles] == [True] * 3 + [False] * 2


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no boundary": ({"boundaries": ()}, "boundaries must name at least one shape"),
    "no shape": ({"boundaries": ((),)}, r"boundaries must be shapes .* got \(\)"),
    "an empty shape": ({"boundaries": ((0, 2),)}, r"at least 1, got \(0, 2\)"),
    "precision": ({"precision": "int4"}, "precision must be one of"),
    "forget_after": ({"forget_after": 0.0}, "forget_after must be above 0 or None"),
    "num_classes": ({"num_classes": 0}, "num_classes must be at least 1"),
    "other workers": (
        {"inner": Gossip(topology=complete(3), num_rounds=2)},
        "inner is for 3 workers, but num_first is 1",
    ),
    "a server": (
        {"inner": ASP(num_workers=2, num_rounds=2), "num_first": 3},
        "inner has workers that are 'server'",
    ),
    "stages in stages": ({"inner": decoupled()}, "inner has workers that are 'stage-0'"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    for make in (decoupled, pipelined):
        with pytest.raises(ValueError, match=message):
            make(**changes)


def test_numbers_of_their_own_have_ranges_too() -> None:
    with pytest.raises(ValueError, match="max_waiting must be at least 1"):
        decoupled(max_waiting=0)
    with pytest.raises(ValueError, match="gradient_every must be at least 1 or None"):
        decoupled(gradient_every=0)
    with pytest.raises(ValueError, match="in_flight must be at least 1 or None"):
        pipelined(in_flight=0)
    with pytest.raises(ValueError, match="patience must be above 0"):
        pipelined(patience=0.0)


def test_settings_that_do_not_go_together_are_warned_of() -> None:
    assert not decoupled().warnings(Setting())
    (lossy,) = decoupled().warnings(Setting(drops_messages=True))
    assert "set forget_after" in lossy
    assert not decoupled(forget_after=1.0).warnings(Setting(drops_messages=True))
    (short,) = pipelined(inner=Alone(num_rounds=9)).warnings(Setting())
    assert "finishes its 1 local steps" in short


# What a trainer gives.

WRONG: dict[str, tuple[Payload, str]] = {
    "nothing": ({}, r"gives \[\], not activations and labels"),
    "another shape": (
        {**batch(), "activations": torch.zeros(2, 7)},
        r"of shape \(7,\), but boundaries say \(3,\)",
    ),
    "too many": (batch(num_samples=5), "a batch of 5 samples, but max_batch is 4"),
    "none": (batch(num_samples=0), "a batch of 0 samples"),
    "a label too large": (
        {**batch(), "labels": torch.tensor([0, 5])},
        "labels from 0 to 5, but num_classes is 5",
    ),
    "a label below 0": ({**batch(), "labels": torch.tensor([-1, 2])}, "labels from -1 to 2"),
}


@each_algorithm
@pytest.mark.parametrize(("outputs", "message"), WRONG.values(), ids=WRONG)
def test_what_nobody_would_take_is_an_error_where_it_is_made(
    algorithm: Stages, outputs: dict[str, Tensor], message: str
) -> None:
    worker = Worker(algorithm, FIRST)
    worker.start()
    with pytest.raises(LocalProtocolError, match=message):
        worker.train(outputs)


# Decoupled.


def test_a_decoupled_stage_goes_on_at_once_and_learns_from_what_comes_back() -> None:
    worker = Worker(decoupled(), FIRST)
    worker.start()
    worker.train(batch())
    assert worker.sent.kind == "activations-0"
    number = int(worker.sent.numbers["batch"])
    assert worker.request.inputs == {}  # it does not wait
    worker.hear(MIDDLE, down(number, gradient()))
    worker.train(batch(2.0))
    lesson = worker.request.inputs
    assert torch.equal(lesson["fit_activations"], batch()["activations"])
    assert torch.equal(lesson["fit_gradient"], gradient())


def test_a_decoupled_stage_waits_for_room_above_and_for_nothing_else() -> None:
    worker = Worker(decoupled(max_waiting=2), FIRST)
    worker.start()
    worker.train(batch())
    first = int(worker.sent.numbers["batch"])
    worker.train(batch())
    assert not of_type(worker.effects, Train)
    worker.hear(MIDDLE, down(first))
    assert worker.request.inputs == {}


def test_a_decoupled_stage_whose_next_one_is_lost_goes_on_alone_and_sends_nothing() -> None:
    worker = Worker(decoupled(max_waiting=1), FIRST)
    worker.start()
    worker.train(batch())
    assert not of_type(worker.effects, Train)
    worker.tell(WorkerLost(MIDDLE))
    for _ in range(3):
        worker.train(batch())
        assert worker.request.inputs == {}
        assert not of_type(worker.effects, Send)
    worker.tell(WorkerJoined(MIDDLE, has_restarted=True))
    worker.train(batch())
    assert worker.sent.kind == "activations-0"


def test_a_gradient_is_asked_for_now_and_then_or_never() -> None:
    for every, expected in ((2, [1, 0, 1, 0]), (None, [0] * 4)):
        worker = Worker(decoupled(gradient_every=every), FIRST)
        worker.start()
        wanted = []
        for _ in range(4):
            worker.train(batch())
            wanted.append(worker.sent.numbers["wants_gradient"])
        assert wanted == expected


# Pipelined.


def test_in_flight_are_no_more_batches_than_may_be() -> None:
    worker = Worker(pipelined(in_flight=3), FIRST)
    worker.start()
    for _ in range(2):
        worker.train(batch())
        assert worker.request
    worker.train(batch())
    assert not of_type(worker.effects, Train)
    assert len(worker.state.pending) == 3


def test_a_gradient_that_is_there_goes_before_the_next_batch() -> None:
    worker = Worker(pipelined(in_flight=3), MIDDLE)
    worker.start()
    for number in range(3):
        worker.hear(FIRST, up(number))
    worker.train(batch())
    number = int(worker.sent.numbers["batch"])
    worker.hear(LAST, down(number, gradient(), boundary=1))
    worker.train(batch())
    assert int(worker.request.inputs["batch"]) == number
    assert torch.equal(worker.request.inputs["gradient"], gradient())
    worker.train(gradient=gradient(0.25))
    assert worker.sent.kind == "done-0"
    assert worker.sent.numbers == {"batch": 0}
    assert torch.equal(worker.sent.payload["gradient"], gradient(0.25))


def test_a_pipelined_stage_whose_next_one_is_lost_waits_and_begins_its_batches_anew() -> None:
    worker = Worker(pipelined(in_flight=2), FIRST)
    worker.start()
    worker.train(batch())
    worker.train(batch())
    assert worker.state.piece is not None
    assert worker.state.piece.num_begun == 2
    worker.tell(WorkerLost(MIDDLE), now=5.0)
    assert not of_type(worker.effects, Train)
    assert worker.state.piece.num_begun == worker.state.piece.num_samples == 0
    assert SetTimer("patience", 605.0) in worker.effects
    worker.tell(WorkerJoined(MIDDLE, has_restarted=True), now=9.0)
    assert "batch" in worker.request.inputs
    assert SetTimer("patience", float("inf")) in worker.effects


def test_a_stage_that_is_away_too_long_ends_the_run_of_those_who_wait_for_it() -> None:
    worker = Worker(pipelined(), FIRST)
    worker.start()
    worker.train(batch())
    worker.tell(WorkerLost(MIDDLE))
    worker.train(batch())
    with pytest.raises(ServerLostError, match=r"has waited 600 s for worker 1, .* --resume"):
        worker.tell(TimerFired("patience"), now=600.0)


def test_one_with_nothing_to_do_waits_for_nobody() -> None:
    worker = Worker(pipelined(), MIDDLE)
    worker.start()
    assert worker.tell(WorkerLost(LAST)) == []
    effects = worker.hear(FIRST, up(0), now=2.0)
    assert effects == [SetTimer("patience", 602.0)]  # from now on there is


def test_a_middle_stage_that_gives_up_says_so_to_those_below() -> None:
    worker = Worker(pipelined(in_flight=3), MIDDLE)
    worker.start()
    worker.hear(FIRST, up(7))
    worker.train(batch())
    worker.tell(WorkerLost(LAST))
    assert worker.sent.numbers == {"batch": 7}
    assert worker.sent.payload == {}
    assert not worker.state.origins


def test_a_batch_that_is_dropped_is_begun_again_in_passes_too() -> None:
    """Or a pass of which all batches are lost would never end."""
    inner = EpochGossip(topology=complete(1), num_rounds=2)
    worker = Worker(pipelined(inner=inner), FIRST)
    worker.tell(Started(num_samples=2, epoch_cost=2.0))
    assert worker.request.begins_pass
    worker.train(batch())
    number = int(worker.sent.numbers["batch"])
    assert not of_type(worker.effects, Train)
    worker.hear(MIDDLE, down(number))
    assert worker.request.work == Epochs(1e-12)  # one batch
    worker.train(batch())
    number = int(worker.sent.numbers["batch"])
    worker.hear(MIDDLE, down(number, gradient()))
    worker.train(gradient=gradient())
    assert worker.state.round == 1


def test_a_gradient_of_another_length_counts_as_none() -> None:
    worker = Worker(pipelined(), FIRST)
    worker.start()
    worker.train(batch())
    number = int(worker.sent.numbers["batch"])
    worker.train(batch())
    worker.train(batch())
    worker.hear(MIDDLE, down(number, gradient(num_samples=3)))
    assert "gradient" not in worker.request.inputs


# The first stage's own algorithm.


def test_messages_of_others_do_not_undo_what_was_trained_meanwhile() -> None:
    gossip = Gossip(topology=complete(2), num_rounds=3, local_steps=3)
    worker = Worker(decoupled(inner=gossip, num_first=2), FIRST)
    worker.start()
    worker.tell(trained_event(PARAMS + 1, PARAMS, outputs=batch()), 1.0)
    worker.hear(1, Message("params", 0, {"params": PARAMS - 9}))
    assert torch.equal(worker.state.params, PARAMS + 1)
    worker.tell(trained_event(PARAMS + 2, PARAMS, outputs=batch()), 2.0)
    assert torch.equal(worker.request.params, PARAMS + 2)


@each_algorithm
def test_a_first_stage_trains_on_one_batch_at_a_time(algorithm: Stages) -> None:
    worker = Worker(algorithm, FIRST)
    worker.start()
    for _ in range(2):
        assert worker.request.work == Steps(1)
        worker.train(batch())


def test_what_was_asked_for_is_answered_as_one_piece() -> None:
    told: list[Event] = []

    class Curious(Alone):
        def handle(self, state: Any, event: Event, now: Seconds) -> list[Effect]:  # noqa: ANN401
            told.append(event)
            return super().handle(state, event, now)

    worker = Worker(decoupled(inner=Curious(num_rounds=2, local_steps=2)), FIRST)
    worker.start()
    for loss, now in ((1.0, 1.0), (3.0, 2.5)):
        event = trained_event(
            PARAMS + now, PARAMS, outputs=batch(), num_samples=2, loss=loss, cost=1.5
        )
        worker.tell(event, now)
    _, piece = told
    assert isinstance(piece, Trained)
    assert (piece.num_samples, piece.num_steps, piece.loss, piece.cost) == (4, 2, 2.0, 3.0)
    assert piece.seconds == 2.5
    assert torch.equal(piece.before, PARAMS)


@each_algorithm
def test_stages_say_nothing_to_an_inner_algorithm_that_is_not_meant(algorithm: Stages) -> None:
    inner = Gossip(topology=complete(2), num_rounds=3)
    worker = Worker(replace(algorithm, inner=inner, num_first=2), FIRST)
    worker.start()
    assert worker.hear(2, up(0)) == []
    assert worker.hear(3, down(0, boundary=1)) == []
    assert worker.hear(2, Message("params", 0, {"params": PARAMS})) == []


# Earlier lives.


@each_algorithm
def test_an_answer_to_an_earlier_life_is_none_to_this_one(algorithm: Stages) -> None:
    first, second = Worker(algorithm, FIRST), Worker(algorithm, FIRST)
    first.start(0.0)
    first.train(batch())
    old = int(first.sent.numbers["batch"])
    second.tell(Started(has_rejoined=True, num_samples=40, epoch_cost=40.0), 3.0)
    second.train(batch(9.0), 4.0)
    before = dict(second.state.pending)
    second.hear(MIDDLE, down(old, gradient()))
    assert second.state.pending.keys() == before.keys()
    assert second.state.answers == []


@each_algorithm
@pytest.mark.parametrize("has_rejoined", [True, False])
def test_a_first_stage_that_comes_back_goes_on_in_the_round_it_had_come_to(
    algorithm: Stages, has_rejoined: bool
) -> None:
    worker = Worker(replace(algorithm, inner=Alone(num_rounds=9, local_steps=4)), FIRST)
    worker.tell(Started(num_samples=40, epoch_cost=40.0, has_rejoined=has_rejoined))
    for round in (7, 8):
        worker.train(batch())
        worker.hear(MIDDLE, down(int(worker.sent.numbers["batch"]), gradient(), round=round))
        assert worker.state.inner.round == (7 if has_rejoined else 0)


def test_a_first_stage_whose_workers_exchange_hears_from_them_where_they_are() -> None:
    inner = Gossip(topology=complete(2), num_rounds=9)
    worker = Worker(decoupled(inner=inner, num_first=2), FIRST)
    worker.tell(Started(num_samples=40, epoch_cost=40.0, has_rejoined=True))
    assert not worker.state.asks_round


@each_algorithm
def test_a_sender_that_begins_anew_has_its_newest_batches_taken(algorithm: Stages) -> None:
    worker = Worker(algorithm, MIDDLE)
    worker.start()
    most = algorithm.max_passed(0)
    for number in range(most + 3):
        worker.hear(FIRST, up(number))
    waiting = [int(message.numbers["batch"]) for _, message in worker.state.waiting]
    assert waiting == [*range(3, most + 3)]  # the very first is trained on


def test_one_sender_takes_no_room_of_another() -> None:
    inner = Gossip(topology=complete(2), num_rounds=3)
    worker = Worker(decoupled(inner=inner, num_first=2, max_waiting=2), 2)
    worker.start()
    worker.hear(1, up(0))
    for number in range(9):
        worker.hear(0, up(number))
    worker.hear(1, up(1))
    assert [sender for sender, _ in worker.state.waiting] == [0, 0, 1]


# Loss.


@each_algorithm
def test_batches_without_an_answer_are_given_up_later_each_time(algorithm: Stages) -> None:
    worker = Worker(replace(algorithm, forget_after=2.0), FIRST)
    worker.start()
    worker.train(batch(), 1.0)
    assert SetTimer("no answer", 3.0) in worker.effects
    worker.tell(TimerFired("no answer"), 3.0)
    assert not worker.state.pending
    worker.train(batch(), 4.0)
    assert SetTimer("no answer", 8.0) in worker.effects
    number = int(worker.sent.numbers["batch"])
    worker.hear(MIDDLE, down(number, gradient()), 5.0)
    assert SetTimer("no answer", float("inf")) in worker.effects
    assert worker.state.num_in_vain == 0


@each_algorithm
def test_training_that_goes_back_drops_what_was_made_of_it(algorithm: Stages) -> None:
    worker = Worker(algorithm, MIDDLE)
    worker.start()
    worker.hear(FIRST, up(0))
    worker.hear(FIRST, up(1))
    worker.train(batch())
    number = next(iter(worker.state.pending))
    worker.hear(LAST, down(number, gradient(), boundary=1))
    effects = worker.tell(trained_event(PARAMS, PARAMS, has_gone_back=True, num_steps=0), 2.0)
    assert not worker.state.pending
    assert not worker.state.answers
    assert not worker.state.origins
    assert {int(s.message.numbers["batch"]) for s in of_type(effects, Send)} <= {0, 1}


@each_algorithm
def test_a_first_stage_that_goes_back_begins_its_work_anew_from_sound_parameters(
    algorithm: Stages,
) -> None:
    worker, sound = Worker(algorithm, FIRST), PARAMS + 7
    worker.start()
    worker.train(batch())
    went_back = trained_event(sound, PARAMS, has_gone_back=True, num_steps=0)
    worker.tell(went_back, 2.0)
    assert torch.equal(worker.request.params, sound)
    assert worker.state.inner is not None
    assert worker.state.inner.round == 1  # the broken work counts as a round without training
    assert worker.state.piece is not None
    assert worker.state.piece.wants_more
    assert worker.state.piece.num_samples == 0


def test_what_a_liar_has_sent_is_forgotten_at_every_point() -> None:
    inner = Gossip(topology=complete(2), num_rounds=3)
    worker = Worker(pipelined(inner=inner, num_first=2, in_flight=4), 2)
    worker.start()
    for number in range(3):
        worker.hear(1, up(number))
        worker.hear(0, up(number))
    for _ in range(3):
        worker.train(batch())
    first, second, _ = worker.state.pending
    worker.hear(3, down(first, gradient(), boundary=1))
    worker.tell(WorkerLost(1, has_lied=True))
    assert all(sender == 0 for sender, _ in worker.state.waiting)
    assert all(sender == 0 for sender, _ in worker.state.origins.values())
    assert [*worker.state.pending] == [second]
    assert worker.state.answers == []


def test_empty_batches_and_those_without_all_labels_are_not_taken() -> None:
    worker = Worker(decoupled(), LAST)
    worker.start()
    for payload in (
        batch(num_samples=0),
        {**batch(), "labels": batch(num_samples=1)["labels"]},
    ):
        message = replace(up(0, boundary=1), payload=payload)
        assert worker.hear(MIDDLE, message) == []


# What fits the schema harms nobody.

KINDS = st.sampled_from(["activations-0", "activations-1", "done-0", "done-1"])
WHAT = st.one_of(
    st.tuples(st.just("hear"), st.integers(0, 3), KINDS, st.integers(0, 6), st.integers(1, 3)),
    st.tuples(st.just("train"), st.booleans()),
    st.tuples(st.sampled_from(["lost", "lied", "joined"]), st.integers(0, 3)),
    st.tuples(st.just("fire")),
)


class Storm:
    """Any messages that fit the schema, from anybody, in any order."""

    def __init__(self, algorithm: Stages, rank: Rank) -> None:
        self.worker = Worker(algorithm, rank)
        self.algorithm = algorithm
        self.worker.start()
        self.requests = [each for each in self.worker.effects if isinstance(each, Train)]

    def do(self, what: tuple[Any, ...]) -> None:
        state = self.worker.state
        match what:
            case ("hear", sender, kind, number, length):
                numbers = [*state.pending]
                number = numbers[number % len(numbers)] if numbers and number > 1 else number
                if kind.startswith("done"):
                    message = Message(
                        kind, 0, {"gradient": gradient(num_samples=length)}, {"batch": number}
                    )
                else:
                    numbers_ = {"batch": number, "wants_gradient": number % 2}
                    message = Message(kind, 0, batch(num_samples=length), numbers_)
                event: Event = Received(sender, message)
            case ("train", goes_back):
                if not self.requests:
                    return
                event = self.trained(self.requests.pop(), goes_back)
            case ("lost", rank):
                event = WorkerLost(rank)
            case ("lied", rank):
                event = WorkerLost(rank, has_lied=True)
            case ("joined", rank):
                event = WorkerJoined(rank)
            case _:
                event = TimerFired("no answer")
        self.requests += of_type(self.worker.tell(event), Train)
        assert len(self.requests) <= 1
        require_bounded(self.algorithm, state)

    def trained(self, request: Train, goes_back: bool) -> Trained:
        inputs = request.inputs
        if "gradient" in inputs:
            outputs: Payload = {"gradient": inputs["gradient"]}
        else:
            outputs = {**batch(), **{n: inputs[n] for n in inputs if n in batch()}}
            outputs = {**outputs, "gradient": outputs["activations"]}
        return trained_event(
            request.params + 1, request.params, outputs=outputs, has_gone_back=goes_back
        )


@each_algorithm
@pytest.mark.parametrize("rank", range(4))
@given(events=st.lists(WHAT, max_size=30))
@settings(max_examples=15)
def test_nothing_that_fits_the_schema_harms_a_stage(
    algorithm: Stages, rank: Rank, events: list[tuple[Any, ...]]
) -> None:
    inner = Alone(num_rounds=3, local_steps=4)
    storm = Storm(replace(algorithm, inner=inner, num_first=2, forget_after=1.0), rank)
    for what in events:
        storm.do(what)


# How numbers travel.

VALUES = st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=12)
ERRORS = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.5 / 127}


@pytest.mark.parametrize("name", ERRORS)
@given(values=VALUES)
@settings(max_examples=30)
def test_errors_of_a_precision_are_bounded(name: str, values: list[float]) -> None:
    x = torch.tensor(values)[:, None]
    precision = Precision(name)
    error = (precision.decode("x", precision.encode("x", x)) - x).abs()
    largest = float(x.abs().max())
    bound = ERRORS[name] * (x.abs() if name == "bfloat16" else largest)
    assert bool((error <= bound * 1.001 + 1e-30).all())


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1.0, LARGEST, 1e30])
def test_all_that_is_sent_fits_whatever_its_size(name: str, size: float) -> None:
    algorithm = decoupled(precision=name)
    schema = algorithm.schema(PARAMS)
    worker = Worker(algorithm, FIRST)
    worker.start()
    worker.train(batch(-size))
    spec = schema[worker.sent.kind]
    sent = worker.sent
    assert spec.mismatch(sent.payload, sent.numbers) is None
    assert spec.bad_values(sent.payload, sent.numbers) is None
    last = Worker(algorithm, LAST)
    last.start()
    last.hear(MIDDLE, replace(sent, kind="activations-1"))
    last.train(gradient=gradient(size))
    spec, sent = schema[last.sent.kind], last.sent
    assert spec.mismatch(sent.payload, sent.numbers) is None
    assert spec.bad_values(sent.payload, sent.numbers) is None


@pytest.mark.parametrize("name", ERRORS)
def test_values_far_beyond_what_is_usual_are_measured(name: str) -> None:
    specs = Precision(name).specs("x", SHAPE, 4)
    sent = Precision(name).encode("x", gradient(-512.0))
    sizes = [specs[each].magnitude(tensor) for each, tensor in sent.items()]
    assert [size for size in sizes if size is not None] == [pytest.approx(512.0)]


def test_a_precision_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be one of \['float32', 'bfloat16', 'int8'\]"):
        Precision("float64")


def test_what_was_given_up_and_comes_late_takes_no_place_of_what_waits() -> None:
    worker = Worker(decoupled(max_waiting=2), MIDDLE)
    worker.start()
    for number in (1, 8, 9, 2):
        worker.hear(FIRST, up(number))
    assert [int(message.numbers["batch"]) for _, message in worker.state.waiting] == [8, 9]


# The end.


@each_algorithm
def test_a_stage_finishes_when_all_below_have_or_are_lost(algorithm: Stages) -> None:
    inner = Gossip(topology=complete(2), num_rounds=3)
    worker = Worker(replace(algorithm, inner=inner, num_first=2), 2)
    assert worker.start() == []  # one that finishes at once may leave a run on real machines
    assert worker.hear(0, Message("end-0", 3)) == []
    assert worker.hear(3, Message("end-0", 3)) == []
    worker.tell(WorkerLost(1))
    assert worker.effects[0] == Finish()
    assert worker.sent.kind == "end-1"


@each_algorithm
def test_a_stage_finishes_when_it_has_trained_on_all_that_came(algorithm: Stages) -> None:
    worker = Worker(algorithm, LAST)
    worker.start()
    worker.hear(MIDDLE, up(0, boundary=1))
    worker.hear(MIDDLE, up(1, boundary=1))
    assert worker.hear(MIDDLE, Message("end-1", 3)) == []
    worker.train(gradient=gradient())
    assert Finish() not in worker.effects
    worker.train(gradient=gradient())
    assert Finish() in worker.effects


@each_algorithm
def test_a_stage_that_is_left_alone_finishes_after_a_while(algorithm: Stages) -> None:
    worker = Worker(algorithm, LAST)
    worker.start()
    worker.tell(WorkerLost(MIDDLE), 5.0)
    assert SetTimer("left alone", 605.0) in worker.effects
    assert worker.tell(TimerFired("left alone"), 605.0) == [Finish()]
    back = Worker(algorithm, LAST)
    back.tell(WorkerLost(MIDDLE), 5.0)
    back.tell(WorkerJoined(MIDDLE), 6.0)
    assert back.tell(TimerFired("left alone"), 605.0) == []


@each_algorithm
def test_a_stage_does_not_finish_while_the_one_above_is_lost_and_may_come_back(
    algorithm: Stages,
) -> None:
    """Nobody else has its part of the model, and alone it could not end the run."""

    def done() -> Worker:
        worker = Worker(algorithm, MIDDLE)
        worker.start()
        worker.tell(WorkerLost(LAST), 5.0)
        worker.hear(FIRST, Message("end-0", 3), 6.0)
        assert SetTimer("left alone", 606.0) in worker.effects
        assert Finish() not in worker.effects
        return worker

    back = done()
    back.tell(WorkerJoined(LAST), 7.0)
    assert Finish() in back.effects
    assert back.sent.kind == "end-1"
    assert done().tell(TimerFired("left alone"), 606.0) == [Finish()]


@each_algorithm
def test_a_first_stage_does_not_either(algorithm: Stages) -> None:
    worker = Worker(replace(algorithm, inner=Alone(num_rounds=1)), FIRST)
    worker.start()
    if isinstance(algorithm, Pipelined):
        worker.train(batch())
        worker.hear(MIDDLE, down(int(worker.sent.numbers["batch"]), gradient()))
    worker.tell(WorkerLost(MIDDLE), 2.0)
    worker.train(batch(), now=3.0)
    assert SetTimer("left alone", 603.0) in worker.effects
    assert Finish() not in worker.effects
    worker.tell(WorkerJoined(MIDDLE), 4.0)
    assert Finish() in worker.effects
    assert worker.sent.kind == "end-0"


@each_algorithm
def test_the_end_is_told_again_where_it_may_be_lost(algorithm: Stages) -> None:
    short = replace(algorithm, inner=Alone(num_rounds=1), forget_after=2.0)
    worker = Worker(short, FIRST)
    worker.start()
    worker.train(batch())
    if isinstance(algorithm, Pipelined):
        worker.hear(MIDDLE, down(int(worker.sent.numbers["batch"]), gradient()))
        worker.train(gradient=gradient())
    kinds = [send.message.kind for send in of_type(worker.effects, Send)]
    assert kinds[-1] == "end-0"
    assert Finish() in worker.effects
    worker.tell(TimerFired("end"), 9.0)
    assert worker.sent.kind == "end-0"
    worker.tell(WorkerJoined(MIDDLE), 10.0)
    assert worker.sent.kind == "end-0"
    for now in range(40):
        worker.tell(TimerFired("end"), 11.0 + now)
    assert not of_type(worker.effects, SetTimer)
