"""Executors of one worker as threads of this process, which may die on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from tests.small_learners import arguments_of
from torch._C._distributed_c10d import HashStore

from edgegossip.contract.protocol import Seconds
from edgegossip.training.executors.follower import Follower
from edgegossip.training.executors.lead import Executors
from edgegossip.training.executors.learners import FollowingLearner, LeadingLearner
from edgegossip.training.executors.links import Group, Message, Place


class KilledError(Exception):
    """The process of an executor ends."""


class Mortal(FollowingLearner):
    """Dies in its step `dies_at`, before or after it has added up its gradient.

    Before its step `sleeps_at`, it sleeps for several times the patience of the others.
    """

    dies_at: int | None = None
    sleeps_at: int | None = None
    dies_late = False
    num_steps = 0

    def differentiate(self, message: Message, group: Group, started: Seconds) -> Message:
        self.num_steps += 1
        if self.num_steps == self.sleeps_at:
            time.sleep(4.0)
        if self.num_steps == self.dies_at and not self.dies_late:
            raise KilledError
        return super().differentiate(message, group, started)

    def conclude(self, group: Group) -> None:
        super().conclude(group)
        if self.num_steps == self.dies_at:
            raise KilledError


@dataclass(frozen=True)
class Crew:
    """A lead and the executors that follow it."""

    lead: LeadingLearner
    executors: Executors
    followers: list[Mortal]


@contextmanager
def together(
    number: int,
    given: dict[str, Any],
    *deaths: tuple[int, int],
    late: bool = False,
    patience: Seconds = 10.0,
    devices: Sequence[str] | None = None,
) -> Iterator[Crew]:
    """Run `number` executors.

    Args:
        number: Number of executors, with the lead.
        given: Arguments of each learner, as for `arguments_of`.
        deaths: Executors that die, and in which of their steps.
        late: Whether they die after they have added up their gradients.
        patience: Seconds to wait for an executor.
        devices: Their devices, by default the CPU.
    """
    store = HashStore()
    settings = [{**given, "torch_device": each} for each in devices or ["cpu"] * number]
    followers = []
    threads = []
    for index in range(1, number):
        follower = Mortal(**arguments_of(settings[index]))
        follower.dies_at, follower.dies_late = dict(deaths).get(index), late

        def follow(learner: Mortal = follower, index: int = index) -> None:
            torch.set_num_threads(1)
            place = Place(index, number, store)
            follower = Follower(learner, place, patience=patience)
            with closing(follower), suppress(KilledError):
                follower.run()

        followers.append(follower)
        threads.append(threading.Thread(target=follow))
        threads[-1].start()
    try:
        place = Place(0, number, store)
        device = torch.device(settings[0]["torch_device"])
        with closing(Executors(place, device, patience=patience)) as executors:
            lead = LeadingLearner(**arguments_of(settings[0]), executors=executors)
            yield Crew(lead, executors, followers)
    finally:
        for thread in threads:
            thread.join(30.0)
            assert not thread.is_alive()
