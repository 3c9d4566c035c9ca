"""SSP: workers commit after every step; the lead of the fastest over the slowest is bounded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgegossip.algorithms.parameter_server.parameter_server import ParameterServer
from edgegossip.algorithms.parameter_server.states import ServerState
from edgegossip.core.algorithm import Traits
from edgegossip.core.protocol import Effect, Seconds
from edgegossip.core.ranges import check_ranges


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
            if not state.is_counted(rank):
                self.merge(state, [rank], 1 / self.num_workers)
        slowest = min((state.rounds[j] for j in self.training(state)), default=self.num_rounds)
        ready = [j for j in sorted(state.waiting) if state.rounds[j] - slowest < self.slack]
        return [self.answer(state, j) for j in ready]
