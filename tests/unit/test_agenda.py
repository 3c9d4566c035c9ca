import heapq
import random
from itertools import count

import pytest

from edgegossip.sim.agenda import Agenda


@pytest.mark.parametrize("times", [[0.0, 0.1, 0.3], [k / 997 for k in range(2000)]])
def test_entries_come_by_time_and_in_the_order_of_insertion(times: list[float]) -> None:
    draw = random.Random(7)
    agenda, heap, serials = Agenda(), list[tuple[float, int]](), count()
    for _ in range(3000):
        if heap and draw.random() < 0.45:
            at, number = heapq.heappop(heap)
            assert agenda.times[0] == at
            assert agenda.pop() == (at, number % 5, number)
        else:
            at, number = draw.choice(times), next(serials)
            heapq.heappush(heap, (at, number))
            agenda.push(at, number % 5, number)
    assert [item for _, _, item in agenda] == [number for _, number in sorted(heap)]


def test_an_entry_for_now_comes_after_those_that_wait_for_now() -> None:
    agenda = Agenda()
    for item in "ab":
        agenda.push(1.0, 0, item)
    first = agenda.pop()
    agenda.push(1.0, 0, "c")
    agenda.push(0.5, 0, "late")  # a driver never does, but order is order
    assert [first, *(agenda.pop() for _ in range(3))] == [
        (1.0, 0, "a"),
        (0.5, 0, "late"),
        (1.0, 0, "b"),
        (1.0, 0, "c"),
    ]
    assert not agenda.times


def test_dropped_entries_leave_the_others_in_order_and_serials_go_on() -> None:
    agenda = Agenda()
    times = agenda.times
    for number in range(12):
        agenda.push(float(number % 3), number % 2, number)
    agenda.keep(lambda entry: entry[1] == 0)
    assert [item for _, _, item in agenda] == [0, 6, 4, 10, 2, 8]
    assert agenda.serial == 12
    assert agenda.times is times


def test_a_loaded_agenda_goes_on_like_the_one_that_was_kept() -> None:
    kept, loaded = Agenda(), Agenda()
    loaded.push(0.0, 0, "forgotten")
    for number in range(9):
        kept.push(number // 3 / 2, 0, number)
    loaded.load(list(kept), kept.serial)
    for agenda in (kept, loaded):
        agenda.push(0.5, 0, "new")
    assert loaded.serial == kept.serial
    assert [loaded.pop() for _ in range(10)] == [kept.pop() for _ in range(10)]
