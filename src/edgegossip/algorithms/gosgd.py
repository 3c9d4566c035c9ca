"""GoSGD: asynchronous gossip with sum-weights; nobody ever waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgegossip.core.algorithm import Algorithm, Traits
from edgegossip.core.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Seconds,
    Send,
    Started,
    Steps,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.core.randomness import uniform
from edgegossip.core.schema import MessageSpec
from edgegossip.core.topology import Topology


@dataclass(slots=True, kw_only=True)
class GoSGDState(WorkerState):
    r"""State of one worker.

    Attributes:
        weight: The sum-weight :math:`\alpha_m`.
        queue: Messages that arrived during the present step, with their senders.
        lost: Workers that cannot be reached, as keys.
        has_finished: Whatever still arrives is merged at once.
    """

    weight: float
    queue: list[tuple[Rank, Message]] = field(default_factory=list)
    lost: dict[Rank, None] = field(default_factory=dict)
    has_finished: bool = False


@dataclass(frozen=True, kw_only=True)
class GoSGD(Algorithm[GoSGDState]):
    r"""Train step by step; now and then push half of the own weight to a random worker.

    Worker :math:`m` starts with :math:`\alpha_m = 1/M` and repeats:

    .. code-block:: text

        for (x_s, a_s) in drain(queue_m):                        # receive
            x_m = (alpha_m x_m + a_s x_s) / (alpha_m + a_s);  alpha_m += a_s
        x_m -= eta * gradient(x_m)                               # train
        if Bernoulli(p):                                         # push
            alpha_m /= 2;  send (x_m, alpha_m) to a random other worker

    The sum of all weights, messages in flight included, is 1 as long as no message is lost.
    A worker that comes back starts with weight 0 and so takes over the first parameters that
    it is sent.

    Args:
        topology: Whom a worker may push to; the paper's choice is the complete graph.
        num_rounds: Steps (blocks of `local_steps`) each worker takes until it finishes.
        exchange_probability: :math:`p`, chance of a push after each block, in [0, 1].
        local_steps: SGD steps in a block; 1 in the paper.
        seed: Of the random choices.

    Raises:
        ValueError: If a number is out of range.

    References:
        Blot et al., "Gossip training for deep learning", 2016, arXiv:1611.09726, Algorithms
        1-3. Departures: messages that wait together are merged in rank order, so that a run
        repeats to the last bit; lost workers are not pushed to.
    """

    topology: Topology
    num_rounds: int
    exchange_probability: float = 0.1
    local_steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.exchange_probability <= 1:
            raise ValueError(
                f"exchange_probability must be in [0, 1], got {self.exchange_probability}"
            )
        for name in ("num_rounds", "local_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def init(self, rank: Rank, params: Tensor) -> GoSGDState:
        return GoSGDState(rank=rank, params=params, weight=1 / self.topology.num_workers)

    @property
    def traits(self) -> Traits:
        rounds, steps = self.num_rounds, self.local_steps
        return Traits(topology=self.topology, num_rounds=rounds, local_steps=steps)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Parameters and their weight, which is never more than that of all workers."""
        ahead = self.num_rounds
        return {
            "push": MessageSpec({"params": params}, numbers={"weight": (0, 1)}, max_ahead=ahead)
        }

    def handle(self, state: GoSGDState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                if event.has_rejoined:
                    state.weight = 0.0
                return [Train(state.params, Steps(self.local_steps))]
            case Trained():
                state.params = event.params
                push = self._push(state)
                state.round += 1
                return [*push, *self._go_on(state)]
            case Received():
                state.queue.append((event.sender, event.message))
                if state.has_finished:
                    self._drain(state)
            case WorkerLost():
                state.lost[event.rank] = None
            case WorkerJoined():
                state.lost.pop(event.rank, None)
        return []

    def _push(self, state: GoSGDState) -> list[Effect]:
        draw = uniform(self.seed, state.rank, "exchange", state.round)
        if draw >= self.exchange_probability:
            return []
        neighbors = self.topology.out_neighbors(state.rank, state.round)
        receivers = [j for j in neighbors if j not in state.lost] if state.lost else neighbors
        if not receivers:
            return []
        choice = uniform(self.seed, state.rank, "receiver", state.round)
        receiver = receivers[int(choice * len(receivers))]
        state.weight /= 2
        push = Message("push", state.round, {"params": state.params}, {"weight": state.weight})
        return [Send(receiver, push)]

    def _go_on(self, state: GoSGDState) -> list[Effect]:
        self._drain(state)
        if state.round >= self.num_rounds:
            state.has_finished = True
            return [Finish()]
        return [Train(state.params, Steps(self.local_steps))]

    def _drain(self, state: GoSGDState) -> None:
        # Rank order, not arrival order: float sums come out bit-identical everywhere.
        for _, message in sorted(state.queue, key=lambda item: (item[0], item[1].round)):
            weight = message.numbers["weight"]
            total = state.weight + weight
            if total > 0:
                # x_m + share * (x_s - x_m), the same convex combination in one pass.
                share = weight / total
                state.params = torch.lerp(state.params, message.payload["params"], share)
                state.weight = total
        state.queue.clear()
