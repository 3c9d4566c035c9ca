"""Fixed ADACOMM: a fixed number of local steps between two averagings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from edgegossip.algorithms.parameter_server.bsp import BSP
from edgegossip.algorithms.parameter_server.states import CommitterState
from edgegossip.core.algorithm import Traits
from edgegossip.core.protocol import Rank
from edgegossip.core.ranges import check_ranges


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
