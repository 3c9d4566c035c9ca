"""BatchTune: batch sizes proportional to speed, so all workers take equally long for a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from edgegossip.algorithms.server.parameter_server import (
    CommitState,
    ParameterServer,
    ServerState,
    require_server,
)
from edgegossip.contract.algorithm import Wrapper, with_numbers, without_numbers
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    Train,
    Trained,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.ranges import check_ranges
from edgegossip.contract.schema import MessageSpec

_SPEED, _RATIO = "speed", "batch_ratio"
"""Numbers added to commits and to the server's answers."""
_MAX_RATIO = 1e4
_MAX_SPEED = 1e12


@dataclass(slots=True, kw_only=True)
class BatchTuneState(WorkerState):
    """State of the server or of a worker.

    Attributes:
        inner: State of the inner algorithm.
        speed: Speed of a worker, in samples per second; 0 before it has trained.
        batch_ratio: Size of a worker's batches relative to the task's.
        speeds: On the server, the last reported speed of each reachable worker.
    """

    inner: CommitState
    speed: float = 0.0
    batch_ratio: float = 1.0
    speeds: dict[Rank, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BatchTune(Wrapper[BatchTuneState]):
    r"""Give fast workers larger batches and slow workers smaller ones, with the same total.

    If worker :math:`i` trains at :math:`v_i` samples per second, and the task's batch size is
    :math:`B`, the :math:`M` workers take batches of

    .. math:: B_i = B\, M \frac{v_i}{\sum_{j=1}^{M} v_j}

    samples, rounded, and at least one. Workers report their speeds with each commit, and
    receive their batch size with each answer. Sizes are equal until all reachable workers have
    reported. The inner algorithm averages updates regardless of the batch size.

    Args:
        inner: Any parameter server; an algorithm with a barrier after a fixed number of steps
            gains the most. `Standby` and `Shards` do not fit: an elected server would not know
            the workers' speeds, and several servers would not agree on the batch sizes.
        smoothing: Weight of the previous estimate of the speed, in [0, 1); 0 uses only the last
            piece of training.

    Raises:
        ValueError: If `smoothing` is out of range, or `inner` is no parameter server.

    References:
        Chen, Wang & Li, "Round-robin synchronization: mitigating communication bottlenecks in
        parameter servers" (R2SP), INFOCOM 2019. The published code of Hu, Wang & Wu, AAAI 2020,
        arXiv:1911.06949, uses this method as a baseline, with this formula. Departures: speeds
        are measured continuously, not once; sizes are rounded, not truncated.
    """

    inner: ParameterServer
    smoothing: float = 0.8

    def __post_init__(self) -> None:
        require_server("BatchTune", self.inner)
        check_ranges(self, smoothing="in [0, 1)")

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """The inner algorithm's messages; commits also carry a speed, and answers a ratio."""
        specs = dict(self.inner.schema(params))
        speed, ratio = {_SPEED: (0, _MAX_SPEED)}, {_RATIO: (1 / _MAX_RATIO, _MAX_RATIO)}
        for kind, numbers in (("commit", speed), ("params", ratio)):
            specs[kind] = replace(specs[kind], numbers={**specs[kind].numbers, **numbers})
        return specs

    def init(self, rank: Rank, params: Tensor) -> BatchTuneState:
        return BatchTuneState(rank=rank, params=params, inner=self.inner.init(rank, params))

    def handle(self, state: BatchTuneState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            # Speeds and ratios travel with messages that are sent anyway. The inner algorithm
            # must not see them, because it keeps messages and reports their numbers.
            case Received(message=Message(kind="commit")):
                state.speeds[event.sender] = event.message.numbers[_SPEED]
                event = without_numbers(event, (_SPEED,))
            case Received(message=Message(kind="params")):
                state.batch_ratio = event.message.numbers[_RATIO]
                event = without_numbers(event, (_RATIO,))
            case Trained() if event.num_samples and event.seconds > 0:
                speed = min(event.num_samples / event.seconds, _MAX_SPEED)
                weight = self.smoothing if state.speed else 0.0
                state.speed = weight * state.speed + (1 - weight) * speed
            case WorkerLost():
                # The others share the batch size that it leaves, and must not wait for its
                # speed if it returns with another one.
                state.speeds.pop(event.rank, None)
        effects = [self._tuned(state, e) for e in self.inner.handle(state.inner, event, now)]
        state.params, state.round = state.inner.params, state.inner.round
        return effects

    def _tuned(self, state: BatchTuneState, effect: Effect) -> Effect:
        match effect:
            case Train():
                return replace(effect, batch_ratio=state.batch_ratio)
            case Send(message=Message(kind="commit")):
                return with_numbers(effect, {_SPEED: state.speed})
            case Send(message=Message(kind="params")):
                return with_numbers(effect, {_RATIO: self._ratio(state, effect.receiver)})
        return effect

    def _ratio(self, state: BatchTuneState, rank: Rank) -> float:
        assert isinstance(state.inner, ServerState)
        speeds = [state.speeds.get(j, 0.0) for j in self.inner.training(state.inner)]
        own = state.speeds.get(rank, 0.0)
        # With some speeds unknown, batches of the known ones would not add up to the total.
        if not own or not all(speeds):
            return 1.0
        ratio = own * len(speeds) / math.fsum(speeds) if speeds else 1.0
        return min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
