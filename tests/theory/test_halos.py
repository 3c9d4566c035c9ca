"""HALoS against its rule: delayed Nesterov steps at two levels, and models mixed on return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.algorithms import NUM_ROUNDS, REGIONS
from tests.random_worlds import draw_world
from tests.tiers import thorough
from tests.worlds import EVEN, NUM_PARAMS, TARGETS, UNEVEN, Recorder, Watched, make_world
from torch import Tensor

from edgegossip.algorithms.server.halos import HALoS, HALoSState
from edgegossip.algorithms.server.halos_levels import LocalServerState
from edgegossip.contract.protocol import Event, Received, Seconds
from edgegossip.sim.fault import Crash, Fault, Faults, Recover
from edgegossip.sim.link import Link, Links

LINKS = Links(default=Link(latency=0.25))
ADDING: dict[str, Any] = {
    "local_momentum": 0.0,
    "global_momentum": 0.0,
    "global_lr": 1.0,
    "global_share": 0.0,
}
"""With these, the global server adds up what the only local one does."""


def halos(*regions: int, **others: Any) -> HALoS:  # noqa: ANN401
    settings: dict[str, Any] = {"num_rounds": NUM_ROUNDS, "local_steps": 3}
    settings |= {"commits_per_sum": 3, "local_buffer": 2, "local_momentum": 0.6}
    return HALoS(regions=regions, **{**settings, **others})


@dataclass
class DelayedNesterov:
    """The paper's rule, with changes for pseudo-gradients and a rate per change."""

    rate: float
    momentum: float
    size: int
    model: Tensor = field(default_factory=lambda: torch.zeros(NUM_PARAMS))
    velocity: Tensor = field(default_factory=lambda: torch.zeros(NUM_PARAMS))
    buffered: list[Tensor] = field(default_factory=list)

    def step(self, change: Tensor) -> Tensor:
        self.buffered.append(change)
        step = self.rate * change
        if len(self.buffered) == self.size:
            mean = torch.stack(self.buffered).mean(0)
            self.velocity = self.momentum * self.velocity + mean
            step = step + self.rate * self.size * self.momentum * self.velocity
            self.buffered = []
        self.model = self.model + step
        return step


@pytest.mark.parametrize("regions", [(0, 1), (0, 0, 1), (1, 0, 0, 1)])
def test_both_levels_step_by_the_rule(regions: tuple[int, ...]) -> None:
    algorithm = halos(*regions, global_lr=0.8, global_momentum=0.5, global_share=0.25)
    num_regions = algorithm.num_regions
    top = DelayedNesterov(0.8 / num_regions, 0.5, algorithm.global_buffer)
    local = {
        1 + each: DelayedNesterov(algorithm.local_lr / regions.count(each), 0.6, 2)
        for each in range(num_regions)
    }
    sums = {rank: torch.zeros(NUM_PARAMS) for rank in local}
    sent: dict[int, Any] = dict.fromkeys(local)
    checked = 0

    def note(state: HALoSState, event: Event, _now: Seconds) -> None:
        nonlocal checked
        if state.rank > num_regions:
            return
        if isinstance(event, Received):
            kind, payload = event.message.kind, event.message.payload
            if kind == "global-commit":
                top.step(payload["update"])
            elif kind == "commit":
                sums[state.rank] += local[state.rank].step(payload["update"])
            elif kind == "global-params":
                own = local[state.rank]
                own.model = 0.75 * own.model + 0.25 * payload["params"]
        expected = top.model if state.rank == 0 else local[state.rank].model
        torch.testing.assert_close(
            state.estimate if state.rank == 0 else state.params, expected
        )
        commit = getattr(state.above, "commit", None)
        if commit is not None and commit is not sent[state.rank]:
            sent[state.rank] = commit
            torch.testing.assert_close(commit.payload["update"], sums[state.rank])
            sums[state.rank] = torch.zeros(NUM_PARAMS)
            checked += 1

    platforms = (UNEVEN * 2)[: 1 + num_regions + len(regions)]
    world = make_world(Watched(algorithm, after=note), platforms=platforms, links=LINKS)
    assert world.run()
    assert checked >= 2 * num_regions
    assert [*world.estimates()] == [0]
    torch.testing.assert_close(world.estimates()[0], top.model)


def test_the_global_server_can_have_the_model_of_the_only_local_one() -> None:
    algorithm = halos(0, 0, 0, **{**ADDING, "local_momentum": 0.6})
    world = make_world(algorithm, platforms=UNEVEN, links=LINKS)
    assert world.run()
    local = world.states[1].local
    assert isinstance(local, LocalServerState)
    assert local.model.norm() > 0.1
    torch.testing.assert_close(world.states[0].estimate, local.model)


def test_one_worker_alone_is_plain_sgd() -> None:
    world = make_world(halos(0, **ADDING, local_lr=1.0), platforms=UNEVEN[:3], links=LINKS)
    assert world.run()
    # Each step of 0.1 towards the target leaves 0.9 of the way.
    expected = (1 - 0.9 ** (3 * NUM_ROUNDS)) * TARGETS[2]
    torch.testing.assert_close(world.states[0].estimate, expected)


def test_few_messages_leave_a_region() -> None:
    recorder = Recorder()
    algorithm = halos(0, 0, 0, commits_per_sum=6)
    assert make_world(algorithm, platforms=EVEN, links=LINKS, observer=recorder).run()
    kinds = [message.kind for message, _ in recorder.messages]
    assert kinds.count("commit") == 3 * NUM_ROUNDS
    # One after every six commits, and what is left at the end.
    assert kinds.count("global-commit") <= 3 * NUM_ROUNDS // 6 + 1
    assert kinds.count("global-params") == kinds.count("global-commit") > 1


def test_workers_do_not_wait_for_the_global_server() -> None:
    slow = Links(
        default=Link(latency=0.25),
        overrides={(0, 1): Link(latency=50.0), (1, 0): Link(latency=50.0)},
    )
    done: dict[bool, Seconds] = {}
    for is_slow in (True, False):
        ends: list[Seconds] = []

        def note(
            state: HALoSState, _event: Event, now: Seconds, into: list[Seconds] = ends
        ) -> None:
            if state.rank > 1 and state.round == NUM_ROUNDS:
                into.append(now)

        algorithm = Watched(halos(0, 0, 0), after=note)
        links = slow if is_slow else LINKS
        assert make_world(algorithm, platforms=UNEVEN, links=links).run()
        done[is_slow] = max(ends)
    assert done[True] == done[False]


@thorough
@pytest.mark.parametrize(
    "script",
    [
        [Crash(at=9.0, rank=0), Recover(at=11.0, rank=0)],
        [Crash(at=5.0, rank=0), Recover(at=30.0, rank=0)],
    ],
)
def test_a_global_server_that_restarts_loses_no_sum(script: list[Fault]) -> None:
    algorithm = halos(0, 0, 0, **ADDING, resend_after=3.0)
    world = make_world(
        algorithm, platforms=UNEVEN, links=LINKS, faults=Faults(script=(*script,))
    )
    assert world.run()
    local = world.states[1].local
    assert isinstance(local, LocalServerState)
    torch.testing.assert_close(world.states[0].estimate, local.model)


def test_a_global_server_that_has_forgotten_a_regions_end_hears_of_it_again() -> None:
    # An answer from before its restart lets the region finish.
    world = draw_world(REGIONS["halos"], 1177).simulator()
    assert world.run()
    assert {state.round for state in world.states} == {4}


def test_regions_without_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"regions must be each worker's region.*got \(0, 2\)"):
        halos(0, 2)
    with pytest.raises(ValueError, match="regions must be each worker's region"):
        halos()
