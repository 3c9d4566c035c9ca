"""SCAFFOLD's control variates around any averaging algorithm, such as EdgeGossip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgegossip.contract import (
    WORKER,
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


@dataclass(slots=True, kw_only=True)
class ControlledState(WrapperState):
    """State of one worker.

    Attributes:
        whole: The inner algorithm's vector, which is twice as long as `params`: the parameters,
            then the control variate.
        layout: Layout of `params`, from `Started`.
        control: The worker's own control variate as last given to the inner algorithm,
            [num_params]; None before the first training.
        drift: What each step of the present round is moved by, [num_params].
        moved: Sum of the steps of the present round, without drift, [num_params].
        num_steps: Number of these steps.
        began: The inner algorithm's round in which the present round began.
        asked: The inner algorithm's vector that training was asked to start from.
    """

    whole: Tensor
    layout: Layout | None = None
    control: Tensor | None = None
    drift: Tensor | None = None
    moved: Tensor | None = None
    num_steps: int = 0
    began: int = 0
    asked: Tensor | None = None

    @property
    def estimate(self) -> Tensor:
        """The first half of the inner algorithm's estimate."""
        return _halves(self.inner.estimate)[0]


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

    Args:
        inner: Any algorithm that averages parameters, best `EdgeGossip` on a complete graph.
        weight: :math:`w`, in [0, 1]. 0 leaves the training as it is.

    Raises:
        ValueError: If `weight` is out of range. `init` and `role` raise it for a server, a
            spare or a stage.

    References:
        Karimireddy et al., "SCAFFOLD", ICML 2020, arXiv:1910.06378, algorithm 1 with option II.
        Departures: no server, but the inner algorithm's average; steps of the parameters in
        place of gradients, for any optimizer whose steps change little from round to round;
        drift after each piece of training instead of each step.

    >>> import torch
    >>> from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
    >>> from edgegossip.algorithms.gossip.epoch_gossip import EpochGossip
    >>> from edgegossip.contract.topology import complete
    >>> inner = EdgeGossip(inner=EpochGossip(topology=complete(4), num_rounds=9))
    >>> state = ControlVariates(inner=inner).init(0, torch.zeros(3))
    >>> len(state.params), len(state.inner.params)
    (3, 6)
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        check_ranges(self, weight="in [0, 1]")

    def role(self, rank: Rank) -> Role:
        """Role in the inner algorithm.

        Raises:
            ValueError: If the rank has no data, or a part of a model.
        """
        role = self.inner.role(rank)
        if role.name != WORKER.name or not role.has_data:
            raise ValueError(
                f"ControlVariates needs an algorithm whose ranks all train a whole model, but "
                f"rank {rank} of {type(self.inner).__name__} is a {role.name} "
                f"{'with' if role.has_data else 'without'} data; leave out the control variates"
            )
        return role

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """The inner algorithm's messages, for vectors that are twice as long."""
        return self.inner.schema(_joined(params, torch.zeros_like(params)))

    def init(self, rank: Rank, params: Tensor) -> ControlledState:
        self.role(rank)
        inner = self.inner.init(rank, _joined(params, torch.zeros_like(params)))
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
        # Tensors never change, so the same vector has the same first half; cutting copies it.
        if state.inner.params is not state.whole:
            state.whole = state.inner.params
            state.params = _halves(state.whole)[0]
        state.round = state.inner.round
        return [self._passed_on(state, effect) for effect in effects]

    def _passed_on(self, state: ControlledState, effect: Effect) -> Effect:
        match effect:
            case Train():
                return self._ask(state, effect)
            case Evaluate(params):
                return Evaluate(_halves(params)[0])
        return effect

    def _ask(self, state: ControlledState, train: Train) -> Train:
        """Ask for training of the parameters alone; a new average begins a new round."""
        params, mean = _halves(train.params)
        own = state.control
        # A training that continues from the worker's own result, as the blocks of `EdgeGossip`
        # do, keeps the round's drift. Another mean than its own variate is a new average:
        # without rounds, or between them, another worker's message may have changed it.
        if own is not None and (state.began < state.round or not torch.equal(mean, own)):
            state.drift = self.weight * (mean - own)
            state.moved, state.num_steps, state.began = None, 0, state.round
        state.asked = train.params
        return replace(train, params=params)

    def _controlled(self, state: ControlledState, event: Trained) -> Trained:
        """Add the drift and the control variate to the result of a piece of training."""
        if event.has_gone_back:  # the steps led to unsound parameters
            state.control = state.drift = state.moved = None
            state.num_steps = 0
            # Not the last average, which may be what led there.
            none = torch.zeros_like(event.params)
            before, params = _joined(event.before, none), _joined(event.params, none)
            return replace(event, before=before, params=params)
        assert state.asked is not None
        params = event.params
        if event.num_steps:  # a skipped training says nothing about steps
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
        control = _halves(state.asked)[1] if state.control is None else state.control
        return replace(event, before=state.asked, params=_joined(params, control))

    def _layout(self, state: ControlledState) -> Layout:
        return state.layout or Layout(state.params.numel())


def _joined(params: Tensor, control: Tensor) -> Tensor:
    return torch.cat([params, control])


def _halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Cut a vector [2 * num_params]; the first half is a copy, which can outlive the vector."""
    length = whole.numel() // 2
    return whole[:length].clone(), whole[length:]
