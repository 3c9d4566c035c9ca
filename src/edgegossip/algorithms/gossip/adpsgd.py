"""ADPSGD: asynchronous training in which pairs of neighbors sometimes average."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from edgegossip.contract import (
    Asynchronous,
    AsynchronousState,
    Awaiting,
    Effect,
    Message,
    MessageSpec,
    Rank,
    Seconds,
    Send,
    Trained,
    WorkerJoined,
    check_ranges,
)


@dataclass(slots=True, kw_only=True)
class ADPSGDState(AsynchronousState):
    """State of one worker.

    Attributes:
        request: Open request, which has no answer yet.
        deferred: Requests that wait for the answer to the worker's own request, by sender.
        answers: Last answer to each neighbor, sent again if the neighbor repeats its request.
        has_averaged: Whether averaging has changed the parameters since training began.
        has_taken_over: Whether the worker has taken over a neighbor's parameters since training
            began; if so, the current block is void.
        is_new: Whether the worker has returned and has no useful model until it hears from a
            neighbor.
    """

    request: Awaiting[None] | None = None
    deferred: dict[Rank, Message] = field(default_factory=dict)
    answers: dict[Rank, Message] = field(default_factory=dict)
    has_averaged: bool = False
    has_taken_over: bool = False
    is_new: bool = False


@dataclass(frozen=True, kw_only=True)
class ADPSGD(Asynchronous[ADPSGDState]):
    r"""Train block by block without waiting; sometimes average with a random neighbor.

    After a block of local steps, with probability :math:`p` and if no request is open, worker
    :math:`i` sends its :math:`x_i` to a random neighbor :math:`j` and trains on. The neighbor
    answers with half of the difference, and both workers move by it:

    .. math::
        d = \tfrac12 (x_i^{sent} - x_j), \qquad x_j \leftarrow x_j + d, \qquad
        x_i \leftarrow x_i - d

    Both workers keep the progress that they make in the meantime; :math:`j` adds its own
    progress to the average at the end of its block. Only training changes the sum over all
    workers and answers in flight.

    While its own request is open, a worker averages with no other worker: it defers requests
    from lower ranks and declines requests from higher ranks. If two workers ask each other at
    once, the lower rank gets the answer.

    An exchange sends two vectors. A worker keeps one more vector while its request is open and,
    with `resend_after`, one for its last answer to each neighbor. :doc:`Algorithms
    </docs/algorithms>` describes what lost messages and workers cost.

    Args:
        topology: Undirected communication graph; may vary with the round of the worker that
            asks.
        num_rounds: Blocks that each worker trains before it finishes.
        exchange_probability: :math:`p`, the probability of a request after each block, in [0,
            1]; 1 in the paper.
        local_steps: SGD steps in a block; 1 in the paper.
        resend_after: Seconds until a request is repeated. None never repeats; safe only on
            lossless links, because a worker stops averaging after a lost request or answer.
        seed: Seeds the random choices.

    Raises:
        ValueError: If the topology is directed, or a number is out of range.

    References:
        Lian, Zhang, Zhang & Liu, "Asynchronous Decentralized Parallel Stochastic Gradient
        Descent", ICML 2018, arXiv:1710.06952, Algorithm 1. Departures: the paper's averaging
        locks both workers and needs a bipartite graph to avoid circular waits; here an exchange
        begins after a block instead of in parallel, and may be declined.
    """

    resend_after: Seconds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology.is_directed:
            raise ValueError(
                f"ADPSGD needs an undirected topology, got {self.topology!r}: an exchange goes "
                "both ways; choose an undirected one, or a push-sum algorithm"
            )
        check_ranges(self, resend_after="above 0 or None")

    def init(self, rank: Rank, params: Tensor) -> ADPSGDState:
        return ADPSGDState(rank=rank, params=params)

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """Requests, both kinds of answers with the requesting worker's round, and models."""
        max_round = self.num_rounds
        return {
            "request": MessageSpec({"params": params}, max_round=max_round),
            "average": MessageSpec({"change": params}, max_round=max_round),
            "decline": MessageSpec(max_round=max_round),
            "model": MessageSpec({"params": params}, max_round=max_round),
        }

    def start(self, state: ADPSGDState, has_rejoined: bool) -> None:
        state.is_new = has_rejoined and self._can_reach_any(state)

    def learn(self, state: ADPSGDState, trained: Trained, now: Seconds) -> list[Effect]:
        # Unsound parameters are dropped with all that was averaged into them.
        if not state.has_averaged or trained.has_gone_back:
            state.params = trained.params
        elif not state.has_taken_over:
            # Changes made by an exchange in the meantime stay.
            state.params = state.params + trained.delta
        state.has_averaged = state.has_taken_over = False
        state.round += 1
        return [*self._ask(state, now), *self.go_on(state)]

    def receive(
        self, state: ADPSGDState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        match message.kind:
            case "request":
                return self._answer(state, sender, message)
            case "model":
                self._take_over(state, message)
                return []
        return self._accept(state, sender, message)

    def finish(self, state: ADPSGDState) -> list[Effect]:
        # Timers do not keep a run open, so an open request that may be repeated must.
        is_asking = state.request is not None and self.resend_after is not None
        return [] if is_asking else super().finish(state)

    # The worker that asks.

    def _ask(self, state: ADPSGDState, now: Seconds) -> list[Effect]:
        if state.request is not None or state.is_new:
            return []  # one open request at a time, and none without a model to average
        partner = self.draw_neighbor(state, "partner")
        if partner is None:
            return []
        request = Message("request", state.round, {"params": state.params})
        state.request = Awaiting.of(Send(partner, request), None, now, self.resend_after)
        return [state.request.send, *Awaiting.timer([state.request])]

    def wake(self, state: ADPSGDState, now: Seconds) -> list[Effect]:
        """Repeat the open request."""
        return [] if state.request is None else Awaiting.resend([state.request], now)

    def _accept(self, state: ADPSGDState, sender: Rank, answer: Message) -> list[Effect]:
        if state.request is None:
            return []  # given up
        request = state.request.send
        if (request.receiver, request.message.round) != (sender, answer.round):
            return []  # given twice
        if answer.kind == "average":
            state.params = state.params - answer.payload["change"]
            state.has_averaged = True
        return self._close(state)

    def _close(self, state: ADPSGDState) -> list[Effect]:
        """Answer the deferred requests, because the worker's own request is settled."""
        state.request = None
        waiting, state.deferred = state.deferred, {}
        answers = [
            effect
            for rank in sorted(waiting)
            for effect in self._answer(state, rank, waiting[rank])
        ]
        return [*answers, *(self.finish(state) if state.has_finished else [])]

    # The worker that is asked.

    def _answer(self, state: ADPSGDState, sender: Rank, request: Message) -> list[Effect]:
        given = state.answers.get(sender)
        if given is not None and request.round <= given.round:
            if request.round == given.round:
                return [Send(sender, given)]
            # Outdated. Its sender may have restarted, and would otherwise ask forever.
            return [Send(sender, Message("decline", request.round))]
        if state.request is not None and sender < state.rank:
            # Two exchanges must not change the same parameters. In a cycle of waiting workers,
            # one would be asked by a higher rank, which is declined, so no cycle lasts.
            state.deferred[sender] = request
            return []
        answer = self._average_or_decline(state, request)
        # A repeated request gets the same answer: this worker has moved by it already.
        if self.resend_after is not None:
            state.answers[sender] = answer
        return [Send(sender, answer)]

    def _average_or_decline(self, state: ADPSGDState, request: Message) -> Message:
        if state.request is not None or state.is_new:
            self._take_over(state, request)
            return Message("decline", request.round)
        change = (request.payload["params"] - state.params) / 2
        state.params = state.params + change
        state.has_averaged = True
        return Message("average", request.round, {"change": change})

    # Lost and returning neighbors.

    def _can_reach_any(self, state: ADPSGDState) -> bool:
        neighbors = self.graph(state).all_out_neighbors(state.rank)
        return any(j not in state.lost for j in neighbors)

    def _take_over(self, state: ADPSGDState, message: Message) -> None:
        """Start again from a neighbor's parameters, unless the worker has already done so."""
        if state.is_new:
            state.params = message.payload["params"]
            state.has_averaged = state.has_taken_over = True
            state.is_new = False

    def lose(self, state: ADPSGDState, rank: Rank) -> list[Effect]:
        state.deferred.pop(rank, None)
        state.answers.pop(rank, None)  # a returning worker may reuse its numbers
        state.is_new = state.is_new and self._can_reach_any(state)
        # The partner may have moved by half of the difference; its answer cannot be waited for.
        is_partner = state.request is not None and state.request.send.receiver == rank
        return self._close(state) if is_partner else []

    def welcome(self, state: ADPSGDState, event: WorkerJoined) -> list[Effect]:
        is_neighbor = event.rank in self.graph(state).all_out_neighbors(state.rank)
        if state.is_new or not event.has_restarted or not is_neighbor:
            return []
        return [Send(event.rank, Message("model", state.round, {"params": state.params}))]
