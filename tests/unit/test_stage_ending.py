"""When a stage is at its end, and whom it tells."""

from __future__ import annotations

import math
from dataclasses import replace

from tests.effects import of_type
from tests.stage_workers import (
    FIRST,
    LAST,
    MIDDLE,
    Worker,
    batch,
    down,
    each_algorithm,
    gradient,
    up,
)

from edgegossip.algorithms.gossip.alone import Alone
from edgegossip.algorithms.gossip.gossip import Gossip
from edgegossip.algorithms.stages.pipelined import Pipelined
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.contract.protocol import (
    Finish,
    Message,
    Send,
    SetTimer,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from edgegossip.contract.topology import complete


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
    # The timer must not stay: a host does not announce a worker that has one.
    assert SetTimer("left alone", math.inf) in back.tell(WorkerJoined(MIDDLE), 6.0)
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
