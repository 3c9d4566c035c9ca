"""NoLoCo: many local steps, then momentum on the progress of a random pair."""

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
    Trained,
    check_ranges,
)


@dataclass(slots=True, kw_only=True)
class NoLoCoState(RoundState):
    r"""State of one worker; `params` is :math:`\phi_i`, from which local steps start.

    Attributes:
        velocity: :math:`\delta_i`, the outer momentum, [num_params].
        progress: :math:`\Delta_i`, the change by this round's local steps, [num_params].
    """

    velocity: Tensor
    progress: Tensor


@dataclass(frozen=True, kw_only=True)
class NoLoCo(LocalSteps[NoLoCoState], NeighborAveraging[NoLoCoState]):
    r"""`DiLoCo` without all workers: each exchanges with one random partner per round.

    In each round worker :math:`i` takes `local_steps` SGD steps from :math:`\phi_i`, which
    change the parameters by :math:`\Delta_i`. With the means over itself and its partner

    .. math::
        \delta_i &\leftarrow \alpha \delta_i + \beta \overline{\Delta}
        - \gamma (\phi_i - \overline{\phi}) \\
        \phi_i &\leftarrow \phi_i + \delta_i

    Models therefore never quite agree; the last term, the *pull*, keeps them together. Workers
    send one vector, :math:`s_i = \beta \Delta_i + \gamma \phi_i`, because the rule needs only
    :math:`\overline{s} - \gamma \phi_i`. A worker that has no partner in a round, or whose
    partner is lost or late, takes the step alone.

    The workers' mean moves like a single worker with momentum :math:`\alpha` that takes
    :math:`\beta` times the mean of their :math:`\Delta_i`, whatever the pairs, as long as no
    message is lost. Among many workers, differences shrink in mean square if and only if
    :math:`\gamma < 2 (1 - \alpha^2)`; two workers tolerate up to :math:`2 (1 + \alpha)`. With
    :math:`\alpha = 0` and :math:`\beta = \gamma = 1`, this is `Gossip` among pairs.

    A worker keeps two vectors in addition to its model. A worker that comes back or skips
    rounds begins with :math:`\delta = 0`.

    Args:
        topology: Undirected graph, such as `random_matching`; with more neighbors than one, the
            means have the weights of `mixing`.
        num_rounds: Number of rounds of training and mixing.
        local_steps: SGD steps between two exchanges, at least 1; about 50 to 100 in the paper.
        outer_momentum: :math:`\alpha`, in [0, 1). Momentum lengthens steps by a factor of
            :math:`1 / (1 - \alpha)`.
        outer_lr: :math:`\beta`, above 0.
        pull: :math:`\gamma`, in (0, 2).
        mixing: Rule that gives the weights of the means.
        timeout: See `Synchronous`.

    Raises:
        ValueError: If the topology is directed, the rule does not average, or a number is out
            of range.

    References:
        Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large
        Models", 2025, arXiv:2506.10911; the rule, with :math:`\gamma = \beta`, is that of the
        authors' code (``SparseOptimizerC``), and the defaults are those of its configurations
        with pairs. The code's own default, :math:`\alpha = 0.9` with :math:`\gamma = 0.7`, is
        beyond the bound above. Departures: one vector is sent instead of two; workers may lack
        a partner; no random routing between pipeline stages; running statistics of
        normalization layers are averaged without momentum. The bounds on :math:`\gamma` are
        derived and tested here.
    """

    outer_momentum: float = 0.5
    outer_lr: float = 0.7
    pull: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, outer_momentum="in [0, 1)", outer_lr="above 0", pull="in (0, 2)")

    def init(self, rank: Rank, params: Tensor) -> NoLoCoState:
        nothing = torch.zeros_like(params)
        return NoLoCoState(rank=rank, params=params, velocity=nothing, progress=nothing)

    def learn(self, state: NoLoCoState, trained: Trained) -> None:
        state.progress = trained.delta
        if trained.has_gone_back:
            state.params = trained.params
            state.velocity = state.progress = torch.zeros_like(trained.params)

    def outgoing(self, state: NoLoCoState, receiver: Rank) -> Payload:
        return {"params": self._told(state)}

    def _told(self, state: NoLoCoState) -> Tensor:
        told = torch.add(self.pull * state.params, state.progress, alpha=self.outer_lr)
        if state.layout is None:
            return told
        return state.layout.with_statistics(told, state.params + state.progress)

    def mix(self, state: NoLoCoState, inbox: Mapping[Rank, Payload]) -> None:
        start, told = state.params, self._told(state)
        state.params = told
        super().mix(state, inbox)
        from_others = state.params - told  # exactly 0 without a partner
        velocity = torch.add(from_others, state.velocity, alpha=self.outer_momentum)
        state.velocity = velocity.add_(state.progress, alpha=self.outer_lr)
        change = state.velocity
        if state.layout is not None:
            # Statistics have no momentum: extrapolated, a variance could become negative.
            change = state.layout.with_statistics(change, state.progress + from_others)
        state.params = start + change

    def catch_up_with(self, state: NoLoCoState, payload: Payload) -> None:
        super().catch_up_with(state, payload)
        state.velocity = torch.zeros_like(state.params)  # it belongs to other parameters
