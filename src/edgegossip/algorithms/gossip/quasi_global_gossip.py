"""QuasiGlobalGossip (QGM): momentum estimated from the mixed parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.contract import (
    LocalSteps,
    NeighborAveraging,
    Payload,
    Rank,
    RoundState,
    Setting,
    Trained,
    check_ranges,
)


@dataclass(slots=True, kw_only=True)
class QuasiGlobalState(RoundState):
    r"""State of one worker.

    Attributes:
        velocity: :math:`v_i`, a change of the parameters per round, with the sign of a gradient
            and the units of parameters, [num_params].
        start: The parameters at the start of the round, :math:`x_i^{(t)}`, [num_params].
    """

    velocity: Tensor
    start: Tensor


@dataclass(frozen=True, kw_only=True)
class QuasiGlobalGossip(LocalSteps[QuasiGlobalState], NeighborAveraging[QuasiGlobalState]):
    r"""Gossip with momentum from the mixed parameters instead of the local gradients.

    Momentum of local gradients drives workers with different data apart. Here momentum is
    estimated from the difference between the mixed parameters of two rounds, which reflects the
    neighbors' data. In each round worker :math:`i`

    1. takes `local_steps` SGD steps from :math:`x_i^{(t)}`, which change the parameters by
       :math:`\Delta_i`, and adds momentum:
       :math:`x_i^{(t+1/2)} = x_i^{(t)} + \Delta_i - \beta v_i^{(t)}`,
    2. sends the result and averages:
       :math:`x_i^{(t+1)} = \sum_j W_{ij} x_j^{(t+1/2)}`,
    3. updates :math:`v_i^{(t+1)} = \mu v_i^{(t)} + (1 - \mu) (x_i^{(t)} - x_i^{(t+1)})`.

    The optimizer of the task must not have momentum: :math:`\Delta_i = -\eta g_i`. At a
    constant learning rate :math:`\eta` and with one local step, this is exactly the paper's
    heavy-ball variant (QG-DSGDm) with :math:`v = \eta \hat m`. The paper keeps :math:`\hat m`,
    subtracts :math:`\eta (\beta \hat m + g)` from :math:`x`, and averages the difference over
    :math:`\eta` into :math:`\hat m`. An algorithm does not know :math:`\eta`, so the product is
    kept here.

    With :math:`\beta = 0` this is `Gossip`. A single worker has quasi-hyperbolic momentum with
    decay :math:`\mu + (1 - \mu) \beta`; its steps add up to :math:`1 / (1 - \beta)` times those
    of plain SGD. If :math:`W` is doubly stochastic, the workers' mean :math:`x` and :math:`v`
    move like those of a single worker that takes the mean of their steps.

    A worker keeps two vectors in addition to its model. A worker that comes back begins with
    :math:`v = 0`. A lost message moves the mean.

    Args:
        topology: Undirected communication graph; may vary in time.
        num_rounds: Number of rounds of training and mixing.
        local_steps: SGD steps between two mixings, at least 1.
        momentum: :math:`\beta`, in [0, 1).
        decay: :math:`\mu`, in [0, 1); None for :math:`\beta`, the paper's choice.
        mixing: Rule that gives the rows of :math:`W`.
        timeout: See `Synchronous`.

    Raises:
        ValueError: If the topology is directed, the rule does not average, or a number is out
            of range.

    References:
        Lin, Karimireddy, Stich & Jaggi, "Quasi-Global Momentum: Accelerating Decentralized
        Deep Learning on Heterogeneous Data", ICML 2021, arXiv:2102.04761, Algorithm 1.
        Departures: after a change of :math:`\eta` the earlier momentum keeps its length and
        decays by a factor of :math:`\mu + (1 - \mu) \beta` per round, while the paper
        rescales it at once; with several local steps, momentum acts once per round, on the
        whole block; the paper's Nesterov variant is omitted.
    """

    momentum: float = 0.9
    decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, momentum="in [0, 1)", decay="in [0, 1) or None")

    def init(self, rank: Rank, params: Tensor) -> QuasiGlobalState:
        velocity = torch.zeros_like(params)
        return QuasiGlobalState(rank=rank, params=params, velocity=velocity, start=params)

    def warnings(self, setting: Setting) -> list[str]:
        """Warn about an optimizer with its own momentum."""
        if not setting.momentum:
            return []
        return [
            "QuasiGlobalGossip has a momentum of its own, and the optimizer also has "
            f"{setting.momentum}; give the task SGD(momentum=0.0)"
        ]

    def learn(self, state: QuasiGlobalState, trained: Trained) -> None:
        # `mix` compares the mixed parameters with those of the start of the round.
        state.start, state.params = trained.before, trained.params
        if trained.is_skipped:
            if trained.has_gone_back:
                state.velocity = torch.zeros_like(state.velocity)
            return
        state.params = torch.sub(trained.params, state.velocity, alpha=self.momentum)
        if state.layout is not None:  # statistics have no momentum
            state.params = state.layout.with_statistics(state.params, trained.params)

    def mix(self, state: QuasiGlobalState, inbox: Mapping[Rank, Payload]) -> None:
        super().mix(state, inbox)
        # After mixing, so that the velocity follows the neighbors' data, too.
        decay = self.momentum if self.decay is None else self.decay
        state.velocity = torch.lerp(state.start - state.params, state.velocity, decay)
