"""Push-sum in synchronous rounds: averaging over directed graphs that may change over time."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from edgegossip.contract import (
    RESEND,
    Effect,
    Event,
    Finish,
    LocalSteps,
    Message,
    MessageSpec,
    NextRound,
    Payload,
    Rank,
    ReliableLinks,
    RoundState,
    Seconds,
    Setting,
    Started,
    TensorSpec,
    TimerFired,
    Trained,
    Work,
    WorkerJoined,
    check_ranges,
)

HARDLY_ANY = 2.0**-30
"""The weight of a worker that has lost its mass and whose parameters are out of date."""


@dataclass(slots=True, eq=False)
class Mass:
    """A part of a worker's numerator, ``share * vector``, with its weight.

    Attributes:
        sender: Worker that gave the mass.
        round: Round of the sender; -1 for mass that belongs to no round and is merged at once.
        vector: [num_params]; may be shared, and is never written to.
        share: Factor of the vector.
        weight: Weight of the mass, at least 0.
    """

    sender: Rank
    round: int
    vector: Tensor
    share: float
    weight: float


@dataclass(slots=True, kw_only=True)
class PushSumState(RoundState):
    """State of one worker.

    Attributes:
        params: The numerator, [num_params].
        weight: The push-sum weight, above 0.
        before_exchange: Numerator and weight before this round's shares were given away; None
            once the others' shares are merged.
        arrived: Mass that waits to be merged.
        links: Links to and from the worker's neighbors.
        needy: Workers that have lost their mass and need new mass, as keys.
        unmet: In an open run, workers with which a new session must begin, as keys.
        has_ended: Whether the worker's rounds are over; arriving mass is then merged at once.
        has_finished: Whether the worker has returned `Finish`.
    """

    weight: float = 1.0
    before_exchange: tuple[Tensor, float] | None = None
    arrived: list[Mass] = field(default_factory=list)
    links: ReliableLinks[Mass] = field(default_factory=ReliableLinks)
    needy: dict[Rank, None] = field(default_factory=dict)
    unmet: dict[Rank, None] = field(default_factory=dict)
    has_ended: bool = False
    has_finished: bool = False

    @property
    def estimate(self) -> Tensor:
        """The numerator over the weight, [num_params]; during an exchange, the value before it.

        During an exchange the numerator is meaningless: the vector given away may be far from a
        share of it, as in `SparsePush`, and the others' vectors have not arrived yet.
        """
        params, weight = self.before_exchange or (self.params, self.weight)
        return params / weight


@dataclass(slots=True, eq=False)
class Offer:
    """An offer in a round: each receiver gets a share of `vector`, sent as `payload`."""

    receivers: Sequence[Rank]
    payload: Payload
    vector: Tensor
    kind: str = "push"


P = TypeVar("P", bound=PushSumState)

_LATEST = 1e12
"""Upper limit of session numbers, which are seconds of the sender's clock."""
_MAX_GROWTH = 2.0**10
"""Largest factor by which the sum of all weights may have grown.

The sum is `num_workers` until a worker is cut off. If that worker had merged a message whose
acknowledgment was lost, the sender takes the mass back, and the mass exists twice. At worst
such a cut doubles the sum; in practice it adds a share of one worker's weight, and each worker
would need more than ten such cuts to reach this factor. Above this limit, a worker scales its
numerator and weight down, which does not change its estimate, so no honest worker claims more.
"""


@dataclass(frozen=True, kw_only=True)
class PushSum(LocalSteps[P], Generic[P]):
    r"""Base of algorithms that push shares of a numerator and a weight.

    Worker :math:`i` has a numerator :math:`x_i` and a weight :math:`w_i`, initially 1, and
    trains at the estimate :math:`z_i = x_i / w_i`. In each round it

    1. takes `local_steps` SGD steps from :math:`z_i` to :math:`z_i'`, and sets
       :math:`x_i = w_i z_i'`,
    2. pushes to each out-neighbor of the round the share :math:`p_i = 1 / (1 + d_i)` of its
       weight, and of a vector :math:`q_i` that stands for its numerator; :math:`d_i` is its
       out-degree in that round,
    3. waits for the in-neighbors of the round and merges their mass in order of rank, with
       consensus step :math:`\gamma`:

    .. math::
        x_i \leftarrow x_i + \gamma \Bigl(\sum_{j \to i} p_j q_j - d_i p_i q_i\Bigr), \quad
        w_i \leftarrow w_i + \gamma \Bigl(\sum_{j \to i} p_j w_j - d_i p_i w_i\Bigr)

    For any :math:`q`, a sender gives away exactly the mass that its receivers get. Therefore,
    **exchanges never change the sums of numerators and of weights over all workers and messages
    in flight**. On every graph that is strongly connected over its period, the estimates tend
    to the quotient of the sums. :doc:`Sparse-Push </docs/sparse-push>` describes what becomes
    of the mass of lost messages and workers.

    Args:
        topology: Graph of each round's messages; may be directed and vary in time.
        num_rounds: Number of rounds of training and pushing.
        local_steps: SGD steps in a round, at least 1.
        resend_after: Seconds without an acknowledgment after which a message is resent; each is
            merged once. With None, nothing is acknowledged, which is safe only on lossless
            links.
        timeout: Seconds that a worker waits for its neighbors in one round before it continues
            with the mass that has arrived; the rest is merged when it arrives. None waits
            indefinitely.

    Raises:
        ValueError: If some worker cannot reach all others over the topology's period, or a
            number is out of range.

    References:
        Kempe, Dobra & Gehrke, "Gossip-Based Computation of Aggregate Information", FOCS 2003.
    """

    kinds: ClassVar[tuple[str, ...]] = ("push",)
    """The kinds of offers."""
    estimate_kinds: ClassVar[tuple[str, ...]] = ()
    """Those of them whose vector stands for the estimate instead of the numerator."""

    resend_after: Seconds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, resend_after="above 0 or None")
        self.topology.require_connected()

    def warnings(self, setting: Setting) -> list[str]:
        """Warn about dropped messages that are never resent."""
        if not setting.drops_messages or self.timeout is None or self.resend_after is not None:
            return []
        return [
            "messages are dropped, and with only a timeout push-sum continues without them, so "
            "in the end all mass is lost; set resend_after"
        ]

    # For algorithms to define.

    @abstractmethod
    def offers(self, state: P, receivers: Sequence[Rank]) -> Iterable[Offer]:
        """Make this round's offers to `receivers` (at least one)."""

    @abstractmethod
    def read(self, state: P, sender: Rank, message: Message) -> Tensor:
        """Read the vector of an offer of `sender`, [num_params].

        Each message is read once, and a sender's messages are read in the order of their
        rounds.
        """

    @abstractmethod
    def payload_schema(self, kind: str, numel: int) -> Mapping[str, TensorSpec]:
        """Describe the payload of an offer of this kind, for `numel` parameters."""

    def meet(self, state: P, neighbor: Rank, estimate: Tensor, *, is_sender: bool) -> None:
        """Restart a link from an estimate of the sender that both ends know.

        Args:
            state: State of the worker at this end.
            neighbor: The worker at the other end.
            estimate: The sender's estimate, [num_params].
            is_sender: Whether the sender is `neighbor`.
        """

    def step(self, kind: str, numel: int) -> float:
        r"""The consensus step :math:`\gamma` of one kind of offer, for `numel` parameters."""
        return 1.0

    # Common to all algorithms.

    @property
    def _max_weight(self) -> float:
        """The largest weight that a worker may have."""
        return _MAX_GROWTH * self.topology.num_workers

    def _mass(
        self,
        sender: Rank,
        round: int,
        kind: str,
        vector: Tensor,
        weight: float,
        degree: float | None = None,
    ) -> Mass:
        r"""Make the mass of an offer to one receiver.

        Both ends compute it from the offer and the sender's weight: :math:`\gamma p` of both.
        In an open run, the offer names the sender's out-degree.
        """
        degree = self.topology.out_degree(sender, round) if degree is None else degree
        share = self.step(kind, vector.numel()) / (1 + degree)
        factor = share * weight if kind in self.estimate_kinds else share
        return Mass(sender, round, vector, factor, weight * share)

    def work(self, state: P) -> Work | None:
        return super().work(state) if state.round < self.num_rounds else None

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Offers, whole estimates for workers that come back, and acknowledgments."""
        # Each is sent with a weight and the session.
        session = {"session": (0.0, _LATEST)}
        mass = {"weight": (0.0, self._max_weight), **session}
        ahead, number = self.total_rounds, self.topology.num_workers
        index = {"index": range(ahead + 1)} if self.topology.follows_members else {}
        degree = {"degree": range(number)} if self.topology.follows_members else {}
        own = {
            kind: MessageSpec(
                self.payload_schema(kind, params.numel()),
                numbers={**mass, **index, **degree},
                max_round=ahead,
            )
            for kind in self.kinds
        }
        return {
            **own,
            "catch-up": MessageSpec(
                {"params": params}, numbers={**mass, **index}, max_round=ahead
            ),
            **self.view_schema(),
            # An acknowledgment names the next round in which the link exists.
            "acknowledged": MessageSpec(
                numbers=session, max_round=ahead + self.topology.period
            ),
        }

    # Events.

    def handle(self, state: P, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started() if self.topology.follows_members:
                state.links.is_counting = True
                if event.has_rejoined:
                    # Whatever it sent in its earlier life, the others no longer expect.
                    others = (j for j in self._members(state) if j != state.rank)
                    state.unmet = dict.fromkeys(others)
                effects = super().handle(state, event, now)
            case TimerFired(name) if name == RESEND:
                effects = state.links.resend(now)
            case WorkerJoined():
                if self.topology.follows_members:
                    state.unmet[event.rank] = None
                if not event.has_restarted:
                    return self._settle(state, super().handle(state, event, now))
                # Noted before the base announces this worker's round, which gives it mass.
                state.needy[event.rank] = None
                if self._hears(state, event.rank):
                    # Its clock may have restarted, so a session with a lower number may be new.
                    next_round = self._next_round_from(state, event.rank)
                    state.links.inlet(event.rank, next_round).has_restarted = True
                effects = super().handle(state, event, now)
            case _:
                effects = super().handle(state, event, now)
        return self._settle(state, effects)

    def _settle(self, state: P, effects: list[Effect]) -> list[Effect]:
        """Merge what has arrived after the end, and finish when all is acknowledged."""
        if state.has_ended:
            # No exchange is left in which mass could wait for its round.
            self._merge_arrived(state)
            # Timers do not keep a run open, so unacknowledged mass must: its receiver may not
            # have it, and after `Finish` nobody would send it again.
            if state.links.is_idle and not state.has_finished:
                state.has_finished = True
                effects.append(Finish())
        return effects

    def rejoin(self, state: P) -> None:
        # Not 0, by which the estimate would divide. So little that the first mass from a
        # neighbor moves the estimate to the neighbor's.
        state.params, state.weight = HARDLY_ANY * state.params, HARDLY_ANY
        # Mass that was sent to the lost state is taken back by its senders. Messages count
        # only in a session that a neighbor opens from now on.
        state.links.first_session = -math.inf

    def lose(self, state: P, rank: Rank) -> None:
        # Mass that is not acknowledged returns to its sender. If the worker was only cut off
        # and had merged it, the mass exists twice, numerator and weight alike, so no estimate
        # leaves the range of the workers' estimates. Waiting for certainty could take forever.
        state.arrived += state.links.take_back(rank)

    def forget(self, state: P, rank: Rank) -> None:
        super().forget(state, rank)
        state.arrived = [mass for mass in state.arrived if mass.sender != rank]
        state.links.forget(rank)

    def learn(self, state: P, trained: Trained) -> None:
        # Mass may have been given away since, but none was merged: x / w is unchanged.
        state.params = state.weight * trained.params

    def mix(self, state: P, inbox: Mapping[Rank, Payload]) -> None:
        # The base only waits: links have already read the messages in `inbox`, and a late one
        # that the base drops has its mass in `arrived` all the same.
        state.before_exchange = None
        self._merge_arrived(state)

    def end(self, state: P) -> list[Effect]:
        state.has_ended = True
        return []

    # Giving.

    def send(self, state: P, receivers: Sequence[Rank], now: Seconds) -> list[Effect]:
        # The share of a lost neighbor stays here: only what is sent is given away.
        if not receivers:
            return []
        # A worker that has joined since the last message to it gets a new session.
        unmet = [j for j in receivers if j in state.unmet]
        effects: list[Effect] = self.announce(state, unmet, now) if unmet else []
        weight, given = state.weight, []
        degree: int | None = None
        numbers: dict[str, float] = {"weight": weight}
        if state.views is not None:
            degree = self._graph(state).out_degree(state.rank, state.round)
            numbers["degree"] = degree
        for offer in self.offers(state, receivers):
            mass = self._mass(state.rank, state.round, offer.kind, offer.vector, weight, degree)
            # Taken back, it belongs to no round and is merged at once.
            mass.round = -1
            for j in offer.receivers:
                message = Message(offer.kind, state.round, offer.payload, numbers)
                given.append(mass)
                effects += state.links.send(j, message, mass, now, self.resend_after)
        state.before_exchange = state.params, weight
        # At once, and not when it is acknowledged: a worker's mass plus that in flight is then
        # the same after every event.
        self._merge(state, given, sign=-1)
        # A worker that receives nothing halves its mass again and again. Before rounding errors
        # grow, both are scaled up, which leaves the estimate alone.
        if state.weight < HARDLY_ANY**2:
            state.params, state.weight = state.params / HARDLY_ANY, state.weight / HARDLY_ANY
        return effects

    def announce(self, state: P, receivers: Sequence[Rank], now: Seconds) -> list[Effect]:
        """Begin a new session with each of `receivers`; each needy one gets half of the mass
        that is left.
        """
        effects: list[Effect] = []
        next_sent = state.round + state.is_exchanging
        for j in receivers:
            part = state.weight / 2 if j in state.needy else 0.0
            state.needy.pop(j, None)
            state.unmet.pop(j, None)
            estimate = state.estimate
            message = Message("catch-up", next_sent, {"params": estimate}, {"weight": part})
            mass = Mass(state.rank, -1, estimate, part, part)
            self.meet(state, j, estimate, is_sender=False)
            # The new session voids what is in flight to a neighbor that was not lost.
            state.arrived += state.links.take_back(j)
            state.links.begin(j, now)
            effects += state.links.send(j, message, mass, now, self.resend_after)
            if part > 0:
                self._merge(state, [mass], sign=-1)
        return effects

    # Getting.

    def receive(self, state: P, sender: Rank, message: Message, now: Seconds) -> list[Effect]:
        if message.kind == "acknowledged":
            return state.links.acknowledge(sender, message)
        if message.kind == "view":
            return super().receive(state, sender, message, now)
        if not self._hears(state, sender):
            return []  # only in-neighbors have mass to give
        next_round = self._next_round_from(state, sender)
        link = state.links.inlet(sender, next_round)
        take_in = link.open if message.kind == "catch-up" else link.accept
        # None for a repeated message, or one that came too early; several if it fills a gap.
        released = take_in(message, next_round)
        state.arrived += [self._unpack(state, sender, each) for each in released]
        effects: list[Effect] = []
        if self.resend_after is not None:
            # A repeated message is acknowledged, too: the acknowledgment may have been lost.
            effects += state.links.acknowledgment(sender, message.numbers["session"])
        for each in released:
            effects += super().receive(state, sender, each, now)
        return effects

    def _unpack(self, state: P, sender: Rank, message: Message) -> Mass:
        weight = message.numbers["weight"]
        if message.kind == "catch-up":
            estimate = message.payload["params"]
            self.meet(state, sender, estimate, is_sender=True)
            return Mass(sender, -1, estimate, weight, weight)
        vector = self.read(state, sender, message)
        degree = message.numbers.get("degree")
        return self._mass(sender, message.round, message.kind, vector, weight, degree)

    def _merge_arrived(self, state: P) -> None:
        """Merge all arrived mass from rounds up to the current one."""
        # A neighbor may be ahead. Merging its mass early would make results depend on speeds.
        due = [mass for mass in state.arrived if mass.round <= state.round]
        if due:
            state.arrived = [mass for mass in state.arrived if mass.round > state.round]
            # Rank order, not arrival order: float sums come out bit-identical everywhere.
            self._merge(state, sorted(due, key=lambda mass: (mass.sender, mass.round)))

    def _merge(self, state: P, masses: Iterable[Mass], sign: int = 1) -> None:
        params = state.params.clone()
        for mass in masses:
            params.add_(mass.vector, alpha=sign * mass.share)
            state.weight += sign * mass.weight
        if state.weight > self._max_weight:
            params.mul_(self._max_weight / state.weight)
            state.weight = self._max_weight
        state.params = params

    # Coming back.

    def catch_up_with(self, state: P, payload: Payload) -> None:
        # The announcement is in `arrived` already, with the mass that came with it.
        state.before_exchange = None
        self._merge_arrived(state)

    # Links.

    def _next_round_from(self, state: P, sender: Rank) -> NextRound:
        """Return a function that finds the next round with a message from `sender`."""

        def next_round(first: int) -> int:
            if self.topology.follows_members:
                return first  # messages are counted
            for round in range(first, first + self.topology.period):
                if state.rank in self.topology.out_neighbors(sender, round):
                    return round
            return self.total_rounds  # never: the sender is no in-neighbor

        return next_round

    def _hears(self, state: P, sender: Rank) -> bool:
        """Whether `sender` sends to this worker in any round; cached."""
        in_neighbors = self.topology.all_in_neighbors
        return sender in state.links.inlets or sender in in_neighbors(state.rank)
