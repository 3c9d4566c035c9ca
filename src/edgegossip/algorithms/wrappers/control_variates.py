"""SCAFFOLD's control variates around any averaging algorithm, such as EdgeGossip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from edgegossip.algorithms.wrappers.inner import whole_model_role
from edgegossip.contract import (
    Effect,
    Evaluate,
    Event,
    Layout,
    MessageSpec,
    Rank,
    Role,
    Seconds,
    Started,
    Train,
    Trained,
    Wrapper,
    WrapperState,
    check_ranges,
)

_GAIN = 8.0
"""Rise of the weight "auto" in a round, for each unit of the gap."""
_SCALE = 2.0**-30
"""Factor of what workers tell: a compressor must not take it for the largest parameters."""
_MAX_GAP = 0.025
"""Largest gap that counts: small losses differ by chance."""


@dataclass(slots=True, kw_only=True)
class ControlledState(WrapperState):
    """State of one worker.

    Attributes:
        whole: The inner algorithm's vector: the parameters, the control variate, which is as
            long, and with the weight "auto" four numbers.
        layout: Layout of `params`, from `Started`.
        control: The worker's own control variate as last given to the inner algorithm,
            [num_params]; None before the first training.
        drift: What each step of the present round is moved by, [num_params].
        moved: Sum of the steps of the present round, without drift, [num_params].
        num_steps: Number of these steps.
        began: The inner algorithm's round in which the present round began.
        asked: The inner algorithm's vector that training was asked to start from.
        loss: Loss of the last average on the first samples of the present round.
        weight: The present weight, if it is "auto".
    """

    whole: Tensor
    layout: Layout | None = None
    control: Tensor | None = None
    drift: Tensor | None = None
    moved: Tensor | None = None
    num_steps: int = 0
    began: int = 0
    asked: Tensor | None = None
    loss: float = 0.0
    weight: float = 0.0

    @property
    def estimate(self) -> Tensor:
        """The parameters in the inner algorithm's estimate."""
        inner: Tensor = self.inner.estimate
        return inner[: self.params.numel()].clone()


@dataclass(frozen=True, kw_only=True)
class ControlVariates(Wrapper[ControlledState]):
    r"""Correct each worker's drift towards its own data, as SCAFFOLD does.

    A worker that trains long between two averages moves towards the minimum of its own data,
    and a fast worker, which takes more steps, pulls the average along. Each worker therefore
    keeps the mean step of its last round as its control variate :math:`c_i`. In the next round
    it adds the difference from the mean over all workers to each step:

    .. math::
        c_i \leftarrow \frac{1}{K_i} \sum_k \Delta_{i,k}, \qquad
        x_i \leftarrow x_i + \Delta_{i,k} + w \, (\bar c - c_i)

    where :math:`\Delta_{i,k}` is the optimizer's step :math:`k` of :math:`K_i`. In the first
    round nothing is moved. The inner algorithm averages :math:`c_i` together with the
    parameters, so messages are twice as large. :math:`\bar c` is that average: the mean over
    all workers on a complete graph, but only over neighbors on a sparse one, where little is
    gained. Running statistics of normalization layers have no control variates.

    A trainer cannot be interrupted, so the drift of several steps is added after each piece of
    training that the inner algorithm asks for. Around `EdgeGossip`, these are its blocks. An
    algorithm that trains in one piece between two averages gains little. If the learning rate
    over (1 - momentum) is above about 0.3, drifts are noisy, and a weight of 1 costs accuracy;
    0.3 costs little.

    Only where the averaged model fits the data of those who train more better than that of
    others is there a drift to correct. The weight "auto" therefore begins at 0, and rises as
    long as that is so. With the loss :math:`l_i` of the last average on the first samples of a
    round, and the number of steps :math:`K_i` in it, in each round

    .. math::
        w \leftarrow \min\Bigl(1, \max\Bigl(0, \; w - 8 \,
        \frac{\overline{lK} - \bar l \, \bar K}{|\bar l| \, \sigma_K}\Bigr)\Bigr)

    where a round changes :math:`w` by at most 0.2. The inner algorithm averages :math:`l_i`,
    :math:`K_i`, :math:`l_i K_i` and :math:`K_i^2` together with the parameters. Once the gap is
    closed, :math:`w` stays. Where all workers take equally many steps, it is 0.

    Args:
        inner: Any algorithm that averages parameters, best `EdgeGossip` on a complete graph.
        weight: :math:`w`, in [0, 1], or "auto". 0 leaves the training as it is.

    Raises:
        ValueError: If `weight` is out of range. `init` and `role` raise it for a server, a
            spare or a stage.

    References:
        Karimireddy et al., "SCAFFOLD", ICML 2020, arXiv:1910.06378, algorithm 1 with option II.
        Departures: no server, but the inner algorithm's average; steps of the parameters in
        place of gradients, for any optimizer whose steps change little from round to round;
        drift after each piece of training instead of each step; the weight, and its rule.

    >>> import torch
    >>> from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
    >>> from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
    >>> from edgegossip.contract.topology import complete
    >>> inner = EdgeGossip(inner=EpochGossip(topology=complete(4), num_rounds=9))
    >>> state = ControlVariates(inner=inner).init(0, torch.zeros(3))
    >>> len(state.params), len(state.inner.params)
    (3, 6)
    """

    weight: float | Literal["auto"] = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, weight='in [0, 1] or "auto"')

    def role(self, rank: Rank) -> Role:
        """Role in the inner algorithm.

        Raises:
            ValueError: If the rank has no data, or a part of a model.
        """
        return whole_model_role(self, rank, "the control variates")

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """The inner algorithm's messages, for vectors that are about twice as long."""
        return self.inner.schema(self._unknown(params))

    def init(self, rank: Rank, params: Tensor) -> ControlledState:
        self.role(rank)
        inner = self.inner.init(rank, self._unknown(params))
        return ControlledState(rank=rank, params=params, whole=inner.params, inner=inner)

    def handle(self, state: ControlledState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                state.layout = event.layout
                # Control variates are averaged as statistics are: never extrapolated.
                event = replace(event, layout=self._layout(state))
            case Trained():
                event = self._controlled(state, event)
        effects = self.inner.handle(state.inner, event, now)
        # Tensors never change, so the same vector has the same parameters. They are a copy,
        # which can outlive the vector.
        if state.inner.params is not state.whole:
            state.whole = state.inner.params
            state.params = state.whole[: state.params.numel()].clone()
        state.round = state.inner.round
        return [self._passed_on(state, effect) for effect in effects]

    def _passed_on(self, state: ControlledState, effect: Effect) -> Effect:
        match effect:
            case Train():
                return self._ask(state, effect)
            case Evaluate(params):
                return Evaluate(params[: state.params.numel()].clone())
        return effect

    def _ask(self, state: ControlledState, train: Train) -> Train:
        """Ask for training of the parameters alone; a new average begins a new round."""
        own, length = state.control, state.params.numel()
        mean = train.params[length : 2 * length]
        # A training that continues from the worker's own result, as the blocks of `EdgeGossip`
        # do, keeps the round's drift. Another mean than its own variate is a new average:
        # without rounds, or between them, another worker's message may have changed it.
        if own is not None and (state.began < state.round or not torch.equal(mean, own)):
            state.weight = self._next_weight(state.weight, train.params[2 * length :])
            state.drift = state.weight * (mean - own)
            state.moved, state.num_steps, state.began = None, 0, state.round
        state.asked = train.params
        return replace(train, params=train.params[:length].clone())

    def _next_weight(self, weight: float, means: Tensor) -> float:
        """The weight of a round that begins, from the `means` over all workers."""
        if self.weight != "auto":
            return self.weight
        loss, num_steps, product, square = (float(each) / _SCALE for each in means)
        spread = math.sqrt(max(0.0, square - num_steps**2))
        # Rounding leaves some spread where there is none; before all have trained, and from a
        # liar, anything may come.
        if not spread > 1e-3 * abs(num_steps) or not loss:
            return weight
        gap = (loss * num_steps - product) / (abs(loss) * spread)
        if math.isnan(gap):
            return weight
        return min(1.0, max(0.0, weight + _GAIN * min(_MAX_GAP, max(-_MAX_GAP, gap))))

    def _controlled(self, state: ControlledState, event: Trained) -> Trained:
        """Add the drift and the control variate to the result of a piece of training."""
        if event.has_gone_back:  # the steps led to unsound parameters
            state.control = state.drift = state.moved = None
            state.num_steps = 0
            # Not the last average, which may be what led there.
            before, params = self._unknown(event.before), self._unknown(event.params)
            if self.weight == "auto" and state.asked is not None:
                # Zeros would pass for a worker that trains least and has no loss.
                before[-4:] = params[-4:] = state.asked[-4:]
            return replace(event, before=before, params=params)
        assert state.asked is not None
        params = event.params
        if event.num_steps:  # a skipped training says nothing about steps
            if state.moved is None:
                state.loss = event.loss  # later in the round, the worker's own steps change it
            step = params - event.before
            state.moved = step if state.moved is None else state.moved + step
            state.num_steps += event.num_steps
            control = state.moved / state.num_steps
            none = torch.zeros_like(control)  # statistics take no steps
            state.control = self._layout(state).with_statistics(control, none)
            if state.drift is not None:
                params = params + event.num_steps * state.drift
        # The inner algorithm sees the variate as if training had changed it, and averages it
        # with the parameters.
        rest = state.asked[len(params) :] if state.control is None else self._measured(state)
        return replace(event, before=state.asked, params=torch.cat([params, rest]))

    def _measured(self, state: ControlledState) -> Tensor:
        """The control variate, and what the rule for the weight needs to know."""
        assert state.control is not None
        if self.weight != "auto":
            return state.control
        assert state.asked is not None
        loss, steps = state.loss, state.num_steps
        told = state.asked[-4:]  # the last means, if there is nothing to tell
        if steps and math.isfinite(loss):
            told = state.control.new_tensor([loss, steps, loss * steps, steps**2]) * _SCALE
        return torch.cat([state.control, told])

    def _unknown(self, params: Tensor) -> Tensor:
        """The inner algorithm's vector before anything is measured."""
        length = params.numel() + 4 * (self.weight == "auto")
        return torch.cat([params, params.new_zeros(length)])

    def _layout(self, state: ControlledState) -> Layout:
        return state.layout or Layout(state.params.numel())
