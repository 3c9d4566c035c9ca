"""Async Local-SGD and FedBuff: nobody waits, and the server's steps are made from a buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgegossip.algorithms.server.outer_server import (
    OuterServer,
    OuterServerState,
    progress_of,
    with_statistics,
)
from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.contract.protocol import Effect, Message, Seconds
from edgegossip.contract.ranges import check_counts, check_ranges


@dataclass(slots=True, kw_only=True)
class MomentumServerState(OuterServerState):
    r"""State of a server with outer momentum; `params` is ahead of `model` by the look-ahead.

    Attributes:
        model: :math:`W`, [num_params].
        velocity: :math:`m`, [num_params].
        buffer: :math:`\Delta`, the sum of the commits since the last change of the momentum,
            [num_params].
        num_buffered: Number of these commits.
    """

    model: Tensor
    velocity: Tensor
    buffer: Tensor
    num_buffered: int = 0

    @property
    def estimate(self) -> Tensor:
        return self.model


@dataclass(frozen=True, kw_only=True)
class AsyncLocalSGD(OuterServer):
    r"""Merge each commit at once, and change the outer momentum after every N commits.

    *Delayed Nesterov* applies each commit :math:`U_i`, a change of the parameters over
    :math:`H_i` steps, on arrival. Stale commits would turn the momentum in many directions, so
    it changes only with the mean of :math:`N` commits. With :math:`\eta = \alpha N / M`

    .. math::
        \Delta &\leftarrow \Delta + U_i \\
        \text{every } N \text{th commit:} \quad m &\leftarrow \beta m + \Delta / N, \quad
        W \leftarrow W + \eta \bigl((1 - cN + c)\, \beta m + U_i / N\bigr), \quad
        \Delta \leftarrow 0 \\
        \text{otherwise:} \quad W &\leftarrow W + \eta \bigl(c\, \beta m + U_i / N\bigr)

    With :math:`N = 1`, :math:`\beta = 0`, :math:`\alpha = 1` and one local step this is `ASP`,
    and with one worker and :math:`N = 1` a Nesterov step on each block of local steps (SNOO).

    *Momentum look-ahead*: with `look_ahead` :math:`k`, workers start from :math:`W + k \eta
    \beta m`, where :math:`k` changes by the momentum alone will lead; :math:`W` is evaluated.

    The momentum and the buffer are the server's own: answers do not carry them. A server that
    has restarted without a checkpoint, and an elected `Standby`, continue from the newest
    model that a worker has, look-ahead included, with momentum 0 and an empty buffer. The
    commits in the buffer are not lost: the model has them.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker.
        resend_after: See `ParameterServer`.
        local_steps: :math:`H`; see `OuterServer`.
        outer_lr: :math:`\alpha`, above 0. A commit moves the model by :math:`\alpha / M` of
            its change at once, and by up to :math:`1 / (1 - \beta)` times as much in the end.
        speeds: Sets :math:`H_i`; see `OuterServer`.
        outer_momentum: :math:`\beta`, in [0, 1).
        buffer_size: :math:`N`, at least 1; None is :math:`M`.
        activation: :math:`c`, in [0, 1 / N]: how much of the momentum each commit applies.
        look_ahead: :math:`k`, at least 0; may be a fraction.

    Raises:
        ValueError: If a number is out of range.

    References:
        Liu et al., "Asynchronous Local-SGD training for language modeling", 2024,
        arXiv:2401.09135, with the formulas in the code of "HALoS", ICML 2025, arXiv:2506.04531.
        "Momentum look-ahead for asynchronous distributed low-communication training", MCDC at
        ICLR 2025; its abstract alone was at hand, so the length of the look-ahead is ours.
        Departures: :math:`\eta` is given relative to N and
        M; learning rates follow the run's progress, not the steps of all workers; speeds are
        measured all the time; running statistics have no momentum, and move by 1 / M.
    """

    outer_momentum: float = 0.7
    buffer_size: int | None = None
    activation: float = 0.0
    look_ahead: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "buffer_size")
        check_ranges(self, outer_momentum="in [0, 1)", look_ahead="at least 0")
        check_ranges(self, buffer_size="at least 1 or None")
        if not 0 <= self.activation <= 1 / self.size:
            raise ValueError(
                f"activation must be in [0, 1 / buffer_size], got {self.activation:g} with a "
                f"buffer of {self.size}; with 1 / buffer_size each commit applies an equal "
                "share of the momentum"
            )

    @property
    def size(self) -> int:
        """Number of commits between two changes of the momentum, :math:`N`."""
        return self.buffer_size or self.num_workers

    def make_server(self, **fields: Any) -> MomentumServerState:  # noqa: ANN401
        zero = torch.zeros_like(fields["params"])
        return MomentumServerState(**fields, model=fields["params"], velocity=zero, buffer=zero)

    def start_serving(self, state: ServerState, now: Seconds) -> list[Effect]:
        assert isinstance(state, MomentumServerState)
        state.model = state.params  # a restarted server has just adopted it
        return []

    def absorb(self, state: MomentumServerState, commits: list[Message]) -> None:
        for commit in commits:
            self._step(state, commit)
        # What k steps add of the momentum, of which none decays.
        ahead = self.look_ahead * self.outer_lr * self.size / self.num_present(state)
        ahead *= self.outer_momentum
        state.params = state.model.add(state.velocity, alpha=ahead) if ahead else state.model

    def _step(self, state: MomentumServerState, commit: Message) -> None:
        beta, c, size = self.outer_momentum, self.activation, self.size
        progress = progress_of(commit)
        state.buffer = state.buffer + progress
        state.num_buffered += 1
        share = c
        if state.num_buffered >= size:
            mean = state.buffer / size
            state.velocity = mean.add(state.velocity, alpha=beta)
            state.buffer, state.num_buffered = torch.zeros_like(mean), 0
            share = 1 - c * size + c
        # The rule, multiplied by N: the rate of a single commit is alpha / M.
        lr = self.outer_lr / self.num_present(state)
        step = progress.add(state.velocity, alpha=size * share * beta)
        # Statistics move by 1 / M, whatever the rate.
        step = with_statistics(commit, step, state.model, share=1 / self.outer_lr)
        state.model = state.model.add(step, alpha=lr)


@dataclass(slots=True, kw_only=True)
class BufferServerState(OuterServerState):
    """State of the server of `FedBuff`.

    Attributes:
        buffer: Sum of the weighted changes that the model lacks, [num_params].
        num_buffered: Number of commits in it.
    """

    buffer: Tensor
    num_buffered: int = 0


@dataclass(frozen=True, kw_only=True)
class FedBuff(OuterServer):
    r"""Collect commits in a buffer, and change the model after every K of them.

    .. math:: W \leftarrow W + \frac{\alpha}{K} \sum_{i=1}^{K} (1 + \tau_i)^{-p}\, U_i

    where :math:`\tau_i` counts the changes of the model since the worker of the :math:`i`-th
    commit got it. Workers do not wait for these changes: each commit is answered at once with
    the model as it is. The last change of the run takes as many commits as are left.

    Commits in the buffer count as merged, but only the server has them: a server that has
    restarted without a checkpoint, or an elected `Standby`, has lost them, at most K - 1.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker.
        resend_after: See `ParameterServer`.
        local_steps: :math:`H`; see `OuterServer`.
        outer_lr: :math:`\alpha`, above 0.
        speeds: Sets each worker's number of steps; see `OuterServer`.
        buffer_size: :math:`K`, at least 1.
        staleness_power: :math:`p`, in [0, 1]; with 0 all commits count alike.

    Raises:
        ValueError: If a number is out of range.

    References:
        Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS
        2022, arXiv:2106.06639, algorithm 1 as we recall it, with the abstract checked.
        Departures: no secure aggregation; every worker starts again at once; staleness is
        counted by commits, so a restart of the server may change it by one.
    """

    speeds: str = "equal"
    buffer_size: int = 10
    staleness_power: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "buffer_size")
        check_ranges(self, buffer_size="at least 1", staleness_power="in [0, 1]")

    def make_server(self, **fields: Any) -> BufferServerState:  # noqa: ANN401
        return BufferServerState(**fields, buffer=torch.zeros_like(fields["params"]))

    def absorb(self, state: BufferServerState, commits: list[Message]) -> None:
        for index, commit in enumerate(commits):
            # All of them are counted, but only those before this one were there when it came.
            num_before = state.version - len(commits) + index
            num_changes = num_before // self.buffer_size
            staleness = num_changes - int(commit.numbers["version"]) // self.buffer_size
            lr = self.outer_lr * (1 + max(0, staleness)) ** -self.staleness_power
            step = lr * progress_of(commit)
            state.buffer = state.buffer + with_statistics(commit, step, state.params, share=1.0)
            state.num_buffered += 1
            # Workers that have finished send no more commits, which would fill the buffer.
            if state.num_buffered >= self.buffer_size or not self.training(state):
                state.params = state.params.add(state.buffer, alpha=1 / self.buffer_size)
                state.buffer, state.num_buffered = torch.zeros_like(state.buffer), 0
