"""ADACOMM: fewer local steps between two averagings as the loss falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from edgegossip.algorithms.server.methods import FixedADACOMM
from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.algorithms.server.worker import CommitterState
from edgegossip.contract.algorithm import Traits
from edgegossip.contract.protocol import Effect, Evaluate, Rank, Seconds, SetTimer
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.schema import Limits

_LARGEST = 1e300


@dataclass(slots=True, kw_only=True)
class ADACOMMServerState(ServerState):
    """State of the server.

    Attributes:
        tau: Current number of local steps in a round.
        first_loss: Loss of the initial model; None before it is known.
    """

    tau: int
    first_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class ADACOMM(FixedADACOMM):
    r"""Average after :math:`\tau` local steps, and lower :math:`\tau` with the loss.

    After each window of :math:`\Gamma` seconds the server measures its model's loss
    :math:`\ell` on validation data:

    .. math::
        \tau' = \sqrt{\ell / \ell_0}\, \tau_0, \qquad
        \tau \leftarrow \begin{cases}
            \lceil \tau' \rceil & \text{if } \tau' < \tau \\
            \lceil \tau / 2 \rceil & \text{otherwise}
        \end{cases}

    Each answer tells a worker the current :math:`\tau`.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Number of rounds.
        resend_after: See `ParameterServer`.
        tau: :math:`\tau_0`, at least 1; the paper tries each value of a grid for one window.
        window: :math:`\Gamma`, seconds between two changes, above 0.

    Raises:
        ValueError: If a number is out of range.

    References:
        Wang & Joshi, SysML 2019, arXiv:1810.08313, equations 17 and 18. Departures: the task's
        schedule sets the learning rate; the loss is measured on validation data.
    """

    evaluates: ClassVar[bool] = True
    window: Seconds = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, window="above 0")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, local_steps=None)

    def make_server(self, **fields: Any) -> ServerState:  # noqa: ANN401
        return ADACOMMServerState(**fields, tau=self.tau)

    @property
    def limits(self) -> Mapping[str, Limits]:
        return {"local_steps": range(1, self.tau + 1)}  # `tau` never rises

    @property
    def optional_limits(self) -> Mapping[str, Limits]:
        # Workers remember the first loss: a restarted server can't measure it any more.
        return {"first_loss": (-_LARGEST, _LARGEST)}

    def recall(self, state: ServerState, numbers: Mapping[str, float]) -> None:
        assert isinstance(state, ADACOMMServerState)
        state.tau = int(numbers.get("local_steps", state.tau))
        state.first_loss = numbers.get("first_loss")

    def start_serving(self, state: ServerState, now: Seconds) -> list[Effect]:
        assert isinstance(state, ADACOMMServerState)
        if state.first_loss is not None:  # it has restarted
            return [self._next_window(now)]
        return [Evaluate(state.params)]

    def wake_server(self, state: ServerState, now: Seconds) -> list[Effect]:
        return [Evaluate(state.params)]

    def judged(self, state: ServerState, loss: float, now: Seconds) -> list[Effect]:
        assert isinstance(state, ADACOMMServerState)
        if not math.isfinite(loss):
            pass  # a loss that is not finite carries no information
        elif state.first_loss is None:
            state.first_loss = loss
        else:
            # A loss of 0 cannot fall any more.
            ratio = loss / state.first_loss if state.first_loss > 0 else 0.0
            wanted = math.sqrt(max(0.0, ratio)) * self.tau
            steps = wanted if wanted < state.tau else state.tau / 2
            state.tau = max(1, math.ceil(steps))
        # The window begins after the measurement, so a slow one never overlaps the next.
        return [self._next_window(now)]

    def _next_window(self, now: Seconds) -> SetTimer:
        return SetTimer("window", now + self.window)

    def settings(self, state: ServerState, rank: Rank) -> Mapping[str, float]:
        assert isinstance(state, ADACOMMServerState)
        known = {} if state.first_loss is None else {"first_loss": state.first_loss}
        return {"local_steps": state.tau, **known}

    def take_settings(
        self, state: CommitterState, numbers: Mapping[str, float], now: Seconds
    ) -> list[Effect]:
        state.local_steps = int(numbers["local_steps"])
        return []
