"""ASP: workers commit after every step, without waiting for each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgegossip.algorithms.parameter_server.parameter_server import ParameterServer
from edgegossip.algorithms.parameter_server.states import ServerState
from edgegossip.core.algorithm import Traits
from edgegossip.core.protocol import Effect, Seconds


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
