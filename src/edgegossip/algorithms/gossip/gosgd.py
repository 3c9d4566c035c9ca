"""GoSGD: asynchronous gossip with sum-weights and without waiting."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.contract import (
    Asynchronous,
    AsynchronousState,
    Effect,
    Message,
    MessageSpec,
    Rank,
    Seconds,
    Send,
    Trained,
)

_LARGEST = 0.5
"""Largest weight of a push: half of all."""


@dataclass(slots=True, kw_only=True)
class GoSGDState(AsynchronousState):
    r"""State of one worker.

    Attributes:
        weight: The sum-weight :math:`\alpha_m`.
        queue: Messages that arrived during the current block, with their senders.
    """

    weight: float
    queue: list[tuple[Rank, Message]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class GoSGD(Asynchronous[GoSGDState]):
    r"""Train step by step; sometimes push half of the weight to a random worker.

    Worker :math:`m` starts with :math:`\alpha_m = 1/M` and repeats:

    .. code-block:: text

        for (x_s, a_s) in drain(queue_m):                        # receive
            x_m = (alpha_m x_m + a_s x_s) / (alpha_m + a_s);  alpha_m += a_s
        x_m -= eta * gradient(x_m)                               # train
        if Bernoulli(p):                                         # push
            alpha_m /= 2;  send (x_m, alpha_m) to a random other worker

    The sum of all weights, including those in flight, is 1 as long as no message is lost. A
    worker that comes back starts with weight 0, so it adopts the first parameters that it
    receives. A lost worker takes its weight with it, and so does a lost message. A fast worker
    takes more steps, but it also pushes more often and so has less weight: all workers' data
    count alike.

    Args:
        topology: Neighbors that a worker may push to; the complete graph in the paper.
        num_rounds: Blocks that each worker trains before it finishes.
        exchange_probability: :math:`p`, the probability of a push after each block, in [0, 1].
        local_steps: SGD steps in a block; 1 in the paper.
        seed: Seeds the random choices.

    Raises:
        ValueError: If a number is out of range.

    References:
        Blot et al., "Gossip training for deep learning", 2016, arXiv:1611.09726, Algorithms
        1-3. Departures: messages that wait together are merged in rank order, so a run can be
        repeated bit for bit; lost workers receive no pushes.
    """

    exchange_probability: float = 0.1

    def init(self, rank: Rank, params: Tensor) -> GoSGDState:
        return GoSGDState(rank=rank, params=params, weight=1 / self.topology.num_workers)

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """Parameters and their weight; the weight is 0 if the sender has just come back, and at
        most half of all.
        """
        push = MessageSpec(
            {"params": params}, numbers={"weight": (0, _LARGEST)}, max_round=self.num_rounds
        )
        return {"push": push}

    def joined(self, older: Message, newer: Message) -> Message | None:
        r"""One push in place of two, with both weights and the weighted mean of the parameters.

        A receiver that gets it ends where it would with both, and the sum of all weights stays
        1. A weight above the limit of a push is not joined. A sender that receives nothing for
        a thousand pushes has halved its weight to 0. Its pushes then change nothing, and one is
        as good as both.
        """
        numbers = older.numbers.keys() | newer.numbers.keys()
        payloads = older.payload.keys() | newer.payload.keys()
        if (older.kind, newer.kind) != ("push", "push") or numbers != {"weight"}:
            return None
        weight = older.numbers["weight"] + newer.numbers["weight"]
        if payloads != {"params"} or weight > _LARGEST:
            return None
        if weight == 0:
            return newer
        share = newer.numbers["weight"] / weight
        params = older.payload["params"].lerp(newer.payload["params"], share)
        return Message("push", newer.round, {"params": params}, {"weight": weight})

    def start(self, state: GoSGDState, has_rejoined: bool) -> None:
        if has_rejoined:
            # Its weight was lost with it. A new share would make the sum exceed 1; with 0, it
            # adopts the first parameters that come.
            state.weight = 0.0

    def learn(self, state: GoSGDState, trained: Trained, now: Seconds) -> list[Effect]:
        state.params = trained.params
        # Messages that came during the block are merged after the push, as if they had arrived
        # before the next block: the paper drains its queue there.
        push = self._push(state)
        state.round += 1
        self._drain(state)
        return [*push, *self.go_on(state)]

    def receive(
        self, state: GoSGDState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        state.queue.append((sender, message))
        if state.has_finished:  # no block will end any more
            self._drain(state)
        return []

    def forget(self, state: GoSGDState, rank: Rank) -> None:
        state.queue = [item for item in state.queue if item[0] != rank]

    def _push(self, state: GoSGDState) -> list[Effect]:
        receiver = self.draw_neighbor(state, "receiver")
        if receiver is None:
            return []
        state.weight /= 2
        push = Message("push", state.round, {"params": state.params}, {"weight": state.weight})
        return [Send(receiver, push)]

    def _drain(self, state: GoSGDState) -> None:
        # Rank order, not arrival order: float sums come out bit-identical everywhere.
        for _, message in sorted(state.queue, key=lambda item: (item[0], item[1].round)):
            weight = message.numbers["weight"]
            total = state.weight + weight
            if total > 0:
                # x_m + share * (x_s - x_m), the same convex combination in one pass.
                share = weight / total
                state.params = state.params.lerp(message.payload["params"], share)
                # All weights add up to 1. A sender that claims more must not make this
                # worker claim more too: its own pushes would then be rejected.
                state.weight = min(total, 1.0)
        state.queue.clear()
