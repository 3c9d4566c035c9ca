"""HeLoCo: turn stale commits towards the outer momentum, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from edgegossip.algorithms.server.outer_server import (
    OuterServer,
    OuterServerState,
    progress_of,
    with_statistics,
)
from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.contract.protocol import Message
from edgegossip.contract.ranges import check_ranges


@dataclass(slots=True, kw_only=True)
class HeLoCoServerState(OuterServerState):
    """State of the server.

    Attributes:
        velocity: :math:`m`, [num_params].
    """

    velocity: Tensor


@dataclass(frozen=True, kw_only=True)
class HeLoCo(OuterServer):
    r"""Merge each commit at once, after correcting each layer by the outer momentum.

    Let :math:`u` and :math:`v` be the directions of the commit's change :math:`U_b` and of the
    momentum :math:`m_b` in layer :math:`b`, and :math:`c = u \cdot v` the cosine of the angle
    between them. With the confidence :math:`f = \|U_b\| / (\|U_b\| + \kappa \|m_b\|)`, the
    corrected change is

    .. math::
        \hat U_b = \begin{cases}
            U_b & \text{if } c \ge c_{ok} \\
            \|U_b\|\, w / \|w\|, \quad w = (1 - l) u + l v, \quad l = \min(k_d (1 - c) f, 1)
                & \text{if } 0 \le c < c_{ok} \\
            U_b - \min(-k_s c f, s)\, c\, \|U_b\|\, v & \text{if } c < 0
        \end{cases}

    so a layer that points elsewhere is turned at the same length, and one that points against
    the momentum loses a share of that component. The server then steps by

    .. math::
        m \leftarrow \mu m + (1 - \mu) \hat U, \qquad
        W \leftarrow W + \tfrac{\alpha}{M} (\hat U + \mu m)

    A layer whose momentum is 0 is not corrected. As in `AsyncLocalSGD`, the momentum is the
    server's own: a server that has restarted without a checkpoint, and an elected `Standby`,
    continue with momentum 0. `Shards` does not fit, because its slices cut layers.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker.
        resend_after: See `ParameterServer`.
        local_steps: :math:`H`; see `OuterServer`.
        outer_lr: :math:`\alpha`, above 0. A commit moves the model by :math:`(1 + \mu)\, \alpha
            / M` times its change in the end, with :math:`\mu = 0.7` by 1.7. In `AsyncLocalSGD`,
            whose momentum is a sum and not an average, it is up to :math:`1 / (1 - \mu)`, or
            3.3, so the same rates give HeLoCo about half of the step.
        speeds: Sets each worker's number of steps; see `OuterServer`.
        sizes: Number of entries in each layer, in order, as for `PerLayer`; None takes the
            whole model for one layer.
        outer_momentum: :math:`\mu`, in [0, 1).
        aligned: :math:`c_{ok}`, in [0, 1]; with 0, no layer is turned.
        turn: :math:`k_d`, at least 0.
        shrink: :math:`k_s`, at least 0.
        max_shrink: :math:`s`, in [0, 1]; with 0, no layer is shrunk.
        damping: :math:`\kappa`, at least 0: how much a long momentum softens corrections.

    Raises:
        ValueError: If a number is out of range, or `sizes` do not add up to the model's length.

    References:
        Al Asif et al., "HeLoCo: Efficient asynchronous low-communication training under data
        and device heterogeneity", 2026, arXiv:2606.00271; the abstract and a summary of the
        formulas were at hand, not their values. Departures: defaults are ours; the learning
        rate is relative to M; there is no further weight for delay; running statistics move by
        1 / M, as measured.
    """

    is_elementwise: ClassVar[bool] = False
    sizes: tuple[int, ...] | None = None
    outer_momentum: float = 0.7
    aligned: float = 0.5
    turn: float = 0.5
    shrink: float = 1.0
    max_shrink: float = 1.0
    damping: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None and (not self.sizes or min(self.sizes) < 1):
            raise ValueError(
                f"sizes must be entries of each layer, at least 1, got {self.sizes}; take "
                "those of the model's parameters"
            )
        check_ranges(self, outer_momentum="in [0, 1)", aligned="in [0, 1]")
        check_ranges(self, turn="at least 0", shrink="at least 0", max_shrink="in [0, 1]")
        check_ranges(self, damping="at least 0")

    def init_server(self, params: Tensor) -> ServerState:
        if self.sizes is not None and sum(self.sizes) != params.numel():
            raise ValueError(
                f"sizes of {len(self.sizes)} layers add up to {sum(self.sizes)}, but the model "
                f"has {params.numel()} entries; take the sizes of the same model's parameters"
            )
        return super().init_server(params)

    def make_server(self, **fields: Any) -> HeLoCoServerState:  # noqa: ANN401
        return HeLoCoServerState(**fields, velocity=torch.zeros_like(fields["params"]))

    def absorb(self, state: HeLoCoServerState, commits: list[Message]) -> None:
        for commit in commits:
            self._step(state, commit)

    def _step(self, state: HeLoCoServerState, commit: Message) -> None:
        mu, progress = self.outer_momentum, progress_of(commit)
        sizes = [*(self.sizes or [len(progress)])]
        layers = (torch.split(each, sizes) for each in (progress, state.velocity))
        change = torch.cat([self._corrected(*layer) for layer in zip(*layers, strict=True)])
        state.velocity = (mu * state.velocity).add(change, alpha=1 - mu)
        step = change.add(state.velocity, alpha=mu)
        # Statistics move by 1 / M, whatever the rate.
        step = with_statistics(commit, step, state.params, share=1 / self.outer_lr)
        state.params = state.params.add(step, alpha=self.outer_lr / self.num_present(state))

    def _corrected(self, change: Tensor, momentum: Tensor) -> Tensor:
        """Return the corrected change of one layer, [num_params of the layer]."""
        length, reference = _length(change), _length(momentum)
        if length == 0 or reference == 0:
            return change
        u, v = change / length, momentum / reference
        cosine = float(u @ v)
        confidence = length / (length + self.damping * reference)
        if cosine >= self.aligned:
            return change
        if cosine < 0:
            share = min(self.shrink * -cosine * confidence, self.max_shrink)
            return change.sub(v, alpha=share * cosine * length)
        w = u.lerp(v, min(self.turn * (1 - cosine) * confidence, 1.0))
        return w * (length / _length(w))


def _length(vector: Tensor) -> float:
    # In float64, because squares of large entries do not fit in float32.
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
