"""DES-LOC: average the optimizer's moments, too, but less often than the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edgegossip.algorithms.wrappers.inner import whole_model_role
from edgegossip.contract import (
    Effect,
    Event,
    MessageSpec,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    TensorSpec,
    Train,
    Trained,
    WorkerLost,
    Wrapper,
    WrapperState,
    check_counts,
    check_ranges,
)

_PREFIX = "moment."


@dataclass(slots=True, kw_only=True)
class MomentsState(WrapperState):
    """State of one worker.

    Attributes:
        moments: The worker's own moments, by kind; empty before its first training.
        arrived: Moments of others, by round and sender, for a round that is not yet mixed.
        due: Moments of others, by sender, that the next training begins with.
        told: The round of the last message with moments to each receiver.
    """

    moments: dict[str, Tensor] = field(default_factory=dict)
    arrived: dict[int, dict[Rank, dict[str, Tensor]]] = field(default_factory=dict)
    due: dict[Rank, dict[str, Tensor]] = field(default_factory=dict)
    told: dict[Rank, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AveragedMoments(Wrapper[MomentsState]):
    r"""Average the optimizer's moments over the workers, each at its own rate.

    Without this wrapper, each worker's optimizer keeps its own state, and only parameters are
    exchanged. Adam's moments :math:`u` (of gradients) and :math:`v` (of their squares) then
    follow the worker's own data. With it, workers add their moments to the inner algorithm's
    messages after every :math:`K_u`-th and :math:`K_v`-th round, and before its next training
    a worker continues from the mean of its own and those that arrived:

    .. math::
        u_i \leftarrow \frac{1}{1 + |N(i)|} \sum_{j \in \{i\} \cup N(i)} u_j
        \quad\text{after round } t \text{ if } t \bmod K_u = 0,

    and :math:`v_i` likewise. Moments change more slowly than parameters, so they need fewer
    exchanges: the paper recommends :math:`K_u = 3` and :math:`K_v = 6` rounds. On a complete
    graph, the mean is that of all workers. Around a synchronous algorithm, it covers the
    neighbors whose messages were mixed in the same round; without rounds, it covers those that
    arrived since the worker's last training.

    Workers may take different numbers of steps. Adam's moments begin at 0, and each step
    corrects them by a factor that depends on the number of steps so far, which stays local.
    Averaged are therefore the corrected moments, :math:`u_i / (1 - \beta^{s_i})` after
    :math:`s_i` steps, and a worker multiplies the mean by its own :math:`1 - \beta^{s_i}`.
    Momentum without such a correction, as that of SGD and Muon, is averaged as it is.

    A moment costs as much as the parameters, uncompressed, per message; where a worker sends
    several messages to one receiver in a round, the first one carries it. A worker that returns
    has no moments until its first training. An optimizer without a moment takes no part: SGD
    has the first one only, and only with momentum; Muon the first one, and the second one of
    parameters that are no matrices. Trainers of stages and `TrainingLoop`, whose optimizers are
    their own, report none.

    Args:
        inner: Any algorithm whose workers exchange tensors, such as `AllReduce`, `Gossip`,
            `GoSGD`, `DoubleSqueeze`, or `EdgeGossip` around one of them.
        first_period: :math:`K_u`, at least 1, in rounds; 1 averages in each round, as Local
            Adam does, and None keeps the first moment local.
        second_period: :math:`K_v`, in the same way.

    Raises:
        ValueError: If a period is out of range. `init` raises it around `DiLoCo`, whose workers
            relay messages, and `init` and `role` do for a server, a spare or a stage.

    References:
        Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
        Foundation Models", ICLR 2026, arXiv:2505.22549, algorithm 1. :math:`K_x` is the inner
        algorithm's ``local_steps``; periods are in rounds, so multiples of it. Departures: any
        inner algorithm, on any graph; an average is that of the receiver and its senders;
        moments are corrected before they are averaged, which changes only rounding if all
        workers have taken as many steps.

    >>> from edgegossip.algorithms.gossip.all_reduce import AllReduce
    >>> from edgegossip.contract.topology import complete
    >>> inner = AllReduce(topology=complete(4), num_rounds=9, local_steps=32)
    >>> AveragedMoments(inner=inner).period_of("second")
    6
    """

    first_period: int | None = 3
    second_period: int | None = 6

    def __post_init__(self) -> None:
        check_counts(self, "first_period", "second_period")
        check_ranges(
            self, first_period="at least 1 or None", second_period="at least 1 or None"
        )

    def period_of(self, kind: str) -> int | None:
        """Rounds between two averages of the first or the second moment."""
        return self.first_period if kind == "first" else self.second_period

    def role(self, rank: Rank) -> Role:
        """Role in the inner algorithm.

        Raises:
            ValueError: If the rank has no data, or a part of a model.
        """
        return whole_model_role(self, rank, "the moments")

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """The inner algorithm's messages, which may carry moments.

        Raises:
            ValueError: If workers relay some of them.
        """
        inner = self.inner.schema(params)
        if any(spec.is_passed_on for spec in inner.values()):
            raise ValueError(
                f"AveragedMoments cannot add to the messages of {type(self.inner).__name__}, "
                "which other workers relay unchanged; on a complete graph, DoubleSqueeze "
                "without a compressor is DiLoCo"
            )
        # No parameter has more than one moment of a kind. Limits would switch off the network's
        # check for values that stand out.
        moment = TensorSpec(params.dtype, (None,), max_numel=params.numel())
        added = {_PREFIX + kind: moment for kind in ("first", "second")}
        return {
            kind: replace(spec, optional={**spec.optional, **added}) if spec.specs else spec
            for kind, spec in inner.items()
        }

    def init(self, rank: Rank, params: Tensor) -> MomentsState:
        self.role(rank)
        inner = self.inner.init(rank, params)
        return MomentsState(rank=rank, params=inner.params, inner=inner)

    def handle(self, state: MomentsState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Trained(has_gone_back=True):
                # Others' moments may be what led to unsound parameters.
                state.moments, state.arrived, state.due = {}, {}, {}
            case Trained() if event.moments:
                state.moments = dict(event.moments)
            case Received():
                event = self._take(state, event)
            case WorkerLost(rank, has_lied=True):
                for arrived in (state.due, *state.arrived.values()):
                    arrived.pop(rank, None)
        before = state.inner.round
        effects = self.inner.handle(state.inner, event, now)
        state.params, state.round = state.inner.params, state.inner.round
        if state.round != before:
            # The moments of the round that was mixed just now. A worker that skips rounds
            # adopts another's parameters, and keeps its own moments.
            mixed = state.arrived.get(state.round - 1, {})
            state.due |= mixed if state.round == before + 1 else {}
            state.arrived = {r: x for r, x in state.arrived.items() if r >= state.round}
        return [self._passed_on(state, effect) for effect in effects]

    def _take(self, state: MomentsState, event: Received) -> Received:
        """Keep the moments in a message; the inner algorithm gets the rest."""
        message, sender = event.message, event.sender
        found = {
            name.removeprefix(_PREFIX): each
            for name, each in message.payload.items()
            if name.startswith(_PREFIX)
        }
        if not found:
            return event
        if not self.traits.is_synchronous:
            state.due[sender] = found
        else:  # those of an earlier round, which is mixed, are never read
            state.arrived.setdefault(message.round, {})[sender] = found
        payload = {n: x for n, x in message.payload.items() if not n.startswith(_PREFIX)}
        return replace(event, message=replace(message, payload=payload))

    def _passed_on(self, state: MomentsState, effect: Effect) -> Effect:
        match effect:
            case Train() if self.first_period or self.second_period:
                averaged = self._average(state)
                state.moments |= averaged
                state.due = {}
                return replace(effect, moments=averaged)
            case Send(receiver, message) if message.payload:
                if state.told.get(receiver) == message.round:
                    return effect
                added = self._due(state, message.round + 1)
                if added:
                    state.told[receiver] = message.round
                    payload = {**message.payload, **added}
                    return replace(effect, message=replace(message, payload=payload))
        return effect

    def _due(self, state: MomentsState, num_rounds: int) -> dict[str, Tensor]:
        """The moments to send after so many rounds."""
        periods = {kind: self.period_of(kind) for kind in state.moments}
        return {
            _PREFIX + kind: state.moments[kind]
            for kind, period in periods.items()
            if period is not None and num_rounds % period == 0
        }

    def _average(self, state: MomentsState) -> dict[str, Tensor]:
        """Average the moments of which others' have arrived."""
        averaged = {}
        for kind, own in state.moments.items():
            found = {
                rank: each[kind]
                for rank, each in state.due.items()
                if kind in each and each[kind].shape == own.shape
            }
            if found and self.period_of(kind) is not None:
                found[state.rank] = own
                # In rank order, so that workers with the same moments have the same mean. A
                # liar's second moment may be negative, and the optimizer takes its root.
                mean = torch.stack([found[rank] for rank in sorted(found)]).mean(0)
                averaged[kind] = mean if kind == "first" else mean.clamp(min=0.0)
        return averaged
