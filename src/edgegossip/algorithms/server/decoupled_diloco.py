"""Decoupled DiLoCo: workers never stand still, and the server merges what comes in time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edgegossip.algorithms.server.fragment_server import FragmentServer, FragmentServerState
from edgegossip.algorithms.server.outer_server import (
    largest_credible,
    progress_of,
    with_statistics,
)
from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.algorithms.server.worker import CommitterState
from edgegossip.contract.protocol import Effect, Message, Rank, Seconds, SetTimer
from edgegossip.contract.ranges import check_counts, check_ranges


@dataclass(slots=True, kw_only=True)
class SyncerState(FragmentServerState):
    """State of the server.

    Attributes:
        velocity: :math:`m`, [num_params].
        closes_at: End of the grace window of each fragment that has a quorum.
    """

    velocity: Tensor
    closes_at: dict[int, Seconds] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DecoupledDiLoCo(FragmentServer):
    r"""Merge the commits of a quorum and of those who come soon after, while all train on.

    The server waits until :math:`K` workers have committed, and then for the others during a
    *grace window* of at most :math:`\gamma` times the duration of the fastest worker's block.
    From the changes :math:`U_i` of those that have come, each made from :math:`s_i` samples in
    :math:`h_i` steps,

    .. math::
        w_i = s_i \cdot s_i / h_i, \qquad
        \Delta = \frac{\sum_i w_i U_i}{\sum_i w_i}, \qquad
        m \leftarrow \mu m + \Delta, \qquad
        W \leftarrow W + \alpha (\Delta + \mu m)

    A weight counts at most 8 times the next largest, because nobody can check :math:`s_i`.

    A worker trains on while its commit is in flight. If :math:`y` are its parameters at the
    commit and :math:`z` those at the answer, it continues from :math:`W + (z - y)`, so no step
    is lost. A commit that misses a merge takes part in the next one. The server waits for no
    lost worker: where fewer than :math:`K` are there, it waits for all of them.

    With `fragments`, a commit is about one fragment of the model, and :math:`s_i` and
    :math:`h_i` count from that fragment's last turn; see `FragmentServer`. Each fragment has a
    quorum and a grace window of its own; if all workers that are there wait, all commits are
    merged.

    Restarts are as in `AsyncLocalSGD`: no commit is lost, but the momentum is. With
    `waits_for_answer`, a quorum of all workers and equal speeds, this is `DiLoCo` without
    compression on a complete graph; without momentum, `FixedADACOMM`.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker.
        resend_after: See `ParameterServer`.
        local_steps: :math:`H`; see `OuterServer`.
        outer_lr: :math:`\alpha`, above 0.
        speeds: Sets each worker's number of steps; see `OuterServer`.
        fragments: :math:`P`; see `FragmentServer`.
        quorum: :math:`K`, in [1, M]; None is half of the workers, rounded up.
        grace: :math:`\gamma`, at least 0; with 0, a quorum is merged at once.
        outer_momentum: :math:`\mu`, in [0, 1).
        waits_for_answer: Whether a worker pauses while its commit is in flight.

    Raises:
        ValueError: If a number is out of range, or the model has fewer entries than fragments.

    References:
        Douillard et al., "Decoupled DiLoCo for resilient distributed pre-training", 2026,
        arXiv:2604.21428; the abstract and a summary of the formulas were at hand. Departures:
        fragments are equal ranges of the flat model, not groups of layers, and each worker's
        own commits count the turns; changes count from the model that a worker started from,
        not from the server's newest; a worker merges its answer where the paper overwrites,
        and gets the model when its own commit is merged; blocks differ by speed, where the
        paper's workers commit at the same time whatever they have; the grace window is a
        share of a block.
    """

    quorum: int | None = None
    grace: float = 0.5
    outer_momentum: float = 0.7
    waits_for_answer: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "quorum")
        check_ranges(self, grace="at least 0", outer_momentum="in [0, 1)")
        check_ranges(self, quorum="at least 1 or None")
        if self.num_needed > self.num_workers:
            raise ValueError(
                f"quorum must be in [1, num_workers] or None, got {self.quorum} of "
                f"{self.num_workers}; it is the number of commits to wait for"
            )

    @property
    def num_needed(self) -> int:
        """Number of commits to wait for, :math:`K`."""
        return -(-self.num_workers // 2) if self.quorum is None else self.quorum

    # The worker.

    def trains_on(self, state: CommitterState) -> bool:
        return not self.waits_for_answer

    # The server.

    def make_server(self, **fields: Any) -> SyncerState:  # noqa: ANN401
        return SyncerState(**fields, velocity=torch.zeros_like(fields["params"]))

    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        assert isinstance(state, SyncerState)
        groups = self._groups(state, sorted(state.waiting))
        waits = any(j not in state.waiting for j in self.training(state))
        effects: list[Effect] = []
        due: list[Rank] = []
        for turn, ranks in groups.items():
            if waits and not self._is_due(state, turn, ranks, now, effects):
                continue
            state.closes_at.pop(turn, None)
            due += ranks
        return [*effects, *(self.take(state, sorted(due)) if due else [])]

    def _groups(self, state: SyncerState, ranks: list[Rank]) -> dict[int, list[Rank]]:
        """Group `ranks` by the fragments of their waiting commits."""
        turns = {rank: self.turn(state.waiting[rank]) for rank in ranks}
        return {k: [j for j in ranks if turns[j] == k] for k in sorted({*turns.values()})}

    def _is_due(
        self,
        state: SyncerState,
        turn: int,
        ranks: list[Rank],
        now: Seconds,
        effects: list[Effect],
    ) -> bool:
        """Whether a fragment has a quorum and its window is over; begin the window if not."""
        if len(ranks) < self.num_needed:
            return False
        if turn not in state.closes_at:
            at = state.closes_at[turn] = now + self._window(state, ranks)
            if at > now:
                # Windows overlap, so each fragment has its own timer.
                name = f"window {turn}" if self.fragments > 1 else "window"
                effects.append(SetTimer(name, at))
        return now >= state.closes_at[turn]

    def _window(self, state: SyncerState, ranks: list[Rank]) -> Seconds:
        """Length of the grace window, in seconds."""
        speeds = [state.waiting[rank].numbers["pace"] for rank in ranks]
        # All blocks last as long as that of the fastest worker. Until its speed is known,
        # nothing says how long that is. A liar can end the window early, after which commits
        # count one merge later; a limit to its speed would be worse, as one that claims to be
        # slow could then stretch the window.
        fastest = max([*speeds, *self.known_speeds(state).values()], default=0.0)
        return self.grace * self.local_steps / fastest if fastest else 0.0

    def absorb_fragment(self, state: SyncerState, part: slice, commits: list[Message]) -> None:
        """Take an outer step on a fragment."""
        weights = [_weight(commit) for commit in commits]
        # Commits without samples, as of skipped training, count alike among themselves.
        weights = weights if any(weights) else [1.0] * len(commits)
        largest = largest_credible(weights)  # nobody can check the samples of others
        weights = [min(weight, largest) for weight in weights]
        params, mu = state.params[part], self.outer_momentum
        mean = measured = nothing = torch.zeros_like(params)
        for commit, weight in zip(commits, weights, strict=True):
            share = weight / sum(weights)
            mean = mean.add(progress_of(commit), alpha=share)
            # Running statistics have no momentum: they move to the mean of those measured.
            measured = measured + with_statistics(commit, nothing, params, share)
        velocity = mean.add(state.velocity[part], alpha=mu)
        step = mean.add(velocity, alpha=mu)
        state.velocity = state.velocity.clone()
        state.velocity[part] = velocity
        state.params[part] = params.add(step, alpha=self.outer_lr).add(measured)


def _weight(commit: Message) -> float:
    numbers = commit.numbers
    num_samples = numbers["num_samples"]
    num_steps = numbers.get("turn_steps", numbers["num_steps"])
    return num_samples * num_samples / num_steps if num_steps else 0.0
