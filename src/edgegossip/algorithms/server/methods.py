"""BSP, SSP, ASP and FixedADACOMM: parameter servers without settings that change on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from edgegossip.algorithms.server.parameter_server import ParameterServer, ServerState
from edgegossip.algorithms.server.worker import CommitterState
from edgegossip.contract.algorithm import Traits
from edgegossip.contract.protocol import Effect, Rank, Seconds
from edgegossip.contract.ranges import check_ranges


@dataclass(frozen=True, kw_only=True)
class ASP(ParameterServer):
    r"""Commit after every step, independently of other workers.

    The server merges each commit on arrival, :math:`W \leftarrow W + U_i / M`, and answers at
    once.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker, one per step.
        resend_after: See `ParameterServer`.

    Raises:
        ValueError: If a number is out of range.

    References:
        Dean et al., "Large scale distributed deep networks", NIPS 2012 (Downpour SGD with one
        step between two fetches). Departure: commits are divided by M, as in `ADSP`.
    """

    @property
    def traits(self) -> Traits:
        return replace(super().traits, local_steps=1)

    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        return self.merge_each(state)


@dataclass(frozen=True, kw_only=True)
class SSP(ParameterServer):
    r"""Commit after every step; wait only when far ahead of the slowest worker.

    The server merges each commit on arrival, :math:`W \leftarrow W + U_i / M`, and answers
    worker :math:`i` as soon as :math:`c_i - \min_j c_j < s`, where :math:`c_i` counts its
    commits. Workers do not wait for lost or finished workers.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker, one per step.
        resend_after: See `ParameterServer`.
        slack: :math:`s`, at least 1; with 1, all workers wait for each other.

    Raises:
        ValueError: If a number is out of range.

    References:
        Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
        server", NIPS 2013. Hu, Wang & Wu, AAAI 2020, arXiv:1911.06949, use it as a baseline
        with s = 40. Departures: commits are divided by M, as in `ADSP`; an answer contains all
        commits so far, not only those of certain clocks.
    """

    slack: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, slack="at least 1")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, local_steps=1)

    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        for rank in sorted(state.waiting):
            # A commit that waits for its answer was merged when it came.
            if not state.is_counted(rank):
                self.merge(state, [rank], 1 / self.num_present(state))
        # Without others that train, nobody is slow: the last worker gets all its answers.
        slowest = min((state.rounds[j] for j in self.training(state)), default=self.num_rounds)
        ready = [j for j in sorted(state.waiting) if state.rounds[j] - slowest < self.slack]
        return [self.answer(state, j) for j in ready]

    def is_held_up(self, state: ServerState) -> bool:
        return len(self.training(state)) > 1


@dataclass(frozen=True, kw_only=True)
class BSP(ParameterServer):
    r"""Average the updates of all workers after every step, behind a barrier.

    .. math:: W \leftarrow W + \frac{1}{M} \sum_{i=1}^{M} U_i

    Updates are summed in rank order, so speeds change durations but never results. Workers do
    not wait for lost workers; :math:`M` is then the number of commits that are added. A worker
    that was absent when the others passed the barrier has trained from an older model. Its
    commit is answered but not added, like a straggler's commit in training with backup workers.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Number of rounds, each of one step.
        resend_after: See `ParameterServer`.

    Raises:
        ValueError: If a number is out of range.

    References:
        Valiant, "A bridging model for parallel computation", CACM 1990. Hu, Wang & Wu, AAAI
        2020, arXiv:1911.06949, section 2, use it as a baseline. For late commits: Chen et al.,
        "Revisiting distributed synchronous SGD", 2016, arXiv:1604.00981.
    """

    @property
    def traits(self) -> Traits:
        return replace(super().traits, is_synchronous=True, local_steps=1)

    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        if any(j not in state.waiting for j in self.training(state)):
            return []
        ranks = sorted(state.waiting)  # the sum must not depend on the order of arrival
        # An old update, added to this round's updates, would overshoot.
        version = state.version
        if fresh := [j for j in ranks if state.waiting[j].numbers["version"] == version]:
            self.merge(state, fresh, 1 / len(fresh))
        # Late commits are counted too, or their senders would repeat them forever.
        for rank in ranks:
            state.count(rank, self.num_rounds)
        return [self.answer(state, j) for j in ranks]

    def is_held_up(self, state: ServerState) -> bool:
        return len(self.training(state)) > 1


@dataclass(frozen=True, kw_only=True)
class FixedADACOMM(BSP):
    r"""Average all workers' updates after every :math:`\tau` local steps.

    This is `BSP` with blocks of several steps; with :math:`\tau = 1` the two are equal.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Number of rounds, each of `tau` steps.
        resend_after: See `ParameterServer`.
        tau: :math:`\tau`, local steps in a round, at least 1.

    Raises:
        ValueError: If a number is out of range.

    References:
        Wang & Joshi, "Adaptive communication strategies to achieve the best error-runtime
        trade-off in local-update SGD", SysML 2019, arXiv:1810.08313. The name and
        :math:`\tau = 40` are from Hu, Wang & Wu, AAAI 2020, arXiv:1911.06949.
    """

    tau: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, tau="at least 1")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, local_steps=self.tau)

    def init_worker(self, rank: Rank, params: Tensor) -> CommitterState:
        state = super().init_worker(rank, params)
        state.local_steps = self.tau
        return state
