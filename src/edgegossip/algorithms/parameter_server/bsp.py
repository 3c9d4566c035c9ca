"""BSP: all workers train a block, all updates are averaged, and the next round begins."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgegossip.algorithms.parameter_server.parameter_server import ParameterServer
from edgegossip.algorithms.parameter_server.states import ServerState
from edgegossip.core.algorithm import Traits
from edgegossip.core.protocol import Effect, Seconds


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
        ranks = sorted(state.waiting)
        # An old update, added to this round's updates, would overshoot.
        version = state.version
        if fresh := [j for j in ranks if state.waiting[j].numbers["version"] == version]:
            self.merge(state, fresh, 1 / len(fresh))
        for rank in ranks:
            state.count(rank, self.num_rounds)
        return [self.answer(state, j) for j in ranks]
