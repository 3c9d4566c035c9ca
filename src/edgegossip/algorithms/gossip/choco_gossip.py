"""ChocoGossip (CHOCO-SGD): workers send compressed differences from their own replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgegossip.compression.compressor import (
    Compressor,
    Identity,
)
from edgegossip.contract import (
    Effect,
    Event,
    LocalSteps,
    Message,
    MessageSpec,
    NeighborAveraging,
    Payload,
    Rank,
    RoundState,
    Seconds,
    Send,
    TensorSpec,
    Trained,
    check_ranges,
)

_UNKNOWN = -1


@dataclass(slots=True, eq=False)
class Replica:
    """State kept for one neighbor.

    Attributes:
        params: The neighbor's replica after all rounds before `round`, [num_params].
        round: Round of the next increment; -1 while the neighbor is lost.
        increments: Payloads that have arrived but are not in `params` yet, by round.
    """

    params: Tensor
    round: int = 0
    increments: dict[int, Payload] = field(default_factory=dict)

    def hear(self, message: Message) -> None:
        """Keep an increment; a late one fills a gap, and a repeated one changes nothing."""
        # An increment that is part of the replica already must not be added twice.
        if message.round >= self.round:
            self.increments[message.round] = message.payload

    def restart(self, message: Message) -> None:
        """Start again from the neighbor's replica as of the start of `message.round`."""
        if message.round >= self.round:
            self.params, self.round = message.payload["params"], message.round
            self.increments = {r: q for r, q in self.increments.items() if r >= self.round}

    def forget(self) -> None:
        """Ignore a lost neighbor until it announces the round in which it restarts."""
        self.round = _UNKNOWN
        self.increments.clear()

    def advance(self, round: int, compressor: Compressor) -> bool:
        """Apply the increments up to `round`, in order; return whether none is missing."""
        while self.round <= round and self.round in self.increments:
            increment = self.increments.pop(self.round)
            self.params = self.params + compressor.decompress(increment, self.params.numel())
            self.round += 1
        return self.round == round + 1


@dataclass(slots=True, kw_only=True)
class ChocoState(RoundState):
    r"""State of one worker.

    Attributes:
        replica: The neighbors' copy of this worker, :math:`\hat x_i`, [num_params].
        replicas: This worker's copy of each neighbor, :math:`\hat x_j`, by rank.
        increment: The last :math:`q_i` sent.
        missed: Neighbors whose increments were missing when the last round was mixed.
    """

    replica: Tensor
    replicas: dict[Rank, Replica]
    increment: Payload = field(default_factory=dict)
    missed: list[Rank] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ChocoGossip(LocalSteps[ChocoState], NeighborAveraging[ChocoState]):
    r"""Train, send a compressed difference, and step toward the neighbors' replicas.

    A worker's replica :math:`\hat x_i`, which its neighbors also hold, is its initial
    parameters plus the sum of its increments. In each round worker :math:`i`

    1. takes `local_steps` SGD steps,
    2. sends :math:`q_i = C(x_i - \hat x_i)`, and receives :math:`q_j`,
    3. updates the replicas, including its own: :math:`\hat x_j \leftarrow \hat x_j + q_j`,
    4. steps toward the neighbors' replicas: :math:`x_i \leftarrow x_i + \gamma \sum_{j \in
       N(i)} W_{ij} (\hat x_j - \hat x_i)`.

    Compression errors remain in :math:`x_i - \hat x_i` and are sent later. If :math:`W` is
    symmetric, as by default, mixing keeps the workers' mean for any :math:`C` and
    :math:`\gamma`, because both ends of an edge have the same two replicas. With
    ``Identity()`` and :math:`\gamma = 1` this is `Gossip`.

    A lost neighbor does not count in a round, nor does a neighbor whose increment is missing or
    comes too late. :doc:`Algorithms </docs/algorithms>` describes how replicas recover.

    Each worker holds its own replica and one replica of each neighbor. The paper keeps only the
    sum of the neighbors' replicas, from which a lost neighbor could not be removed.

    Args:
        topology: Undirected communication graph that never changes, because a replica needs all
            increments.
        num_rounds: Number of rounds of training and mixing.
        compressor: :math:`C`.
        consensus_step: :math:`\gamma`, in (0, 1]. None for the compressor's own
            (`Compressor.consensus_step`): 0.01 if 1 % is kept. On rings, tori and complete
            graphs with 1 to 50 % kept, random-k diverges at 2 to 4 times that value, and top-k
            at 4 to 16 times. (For `Sign` the paper of 2020 uses 0.45, where ours is 0.64.)
        local_steps: SGD steps between two exchanges, at least 1.
        mixing: Rule that gives the rows of :math:`W`.
        timeout: See `Synchronous`.
        seed: Seeds compressors that draw at random.

    Raises:
        ValueError: If the topology is directed or changes, the rule does not average, or a
            number is out of range.

    References:
        Koloskova, Stich & Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms
        with Compressed Communication", ICML 2019, arXiv:1902.00340, Algorithm 2; Koloskova et
        al., "Decentralized Deep Learning with Arbitrary Communication Compression", ICLR 2020,
        arXiv:1907.09356. Departures: replicas begin at the initial parameters, which all
        share, instead of 0; several local steps are allowed.
    """

    compressor: Compressor = Identity()
    consensus_step: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology.follows_members:
            raise ValueError(
                f"ChocoGossip cannot follow members that come and go on {self.topology!r}: a "
                "replica belongs to a fixed neighbor; choose complete(num_workers), or "
                "DifferencePush"
            )
        if self.topology.period > 1:
            raise ValueError(
                f"ChocoGossip needs a topology that never changes, got {self.topology!r} of "
                f"period {self.topology.period}: a replica needs every increment; choose a "
                "static one, or SparsePush, whose error memory stays with the sender"
            )
        check_ranges(self, consensus_step="in (0, 1] or None")

    def step(self, num_params: int) -> float:
        r"""The consensus step :math:`\gamma` for vectors [num_params].

        >>> from edgegossip.compression.sparse import TopK
        >>> from edgegossip.contract.topology import ring
        >>> choco = ChocoGossip(topology=ring(4), num_rounds=1, compressor=TopK(0.01))
        >>> choco.step(1000)
        0.01
        """
        return self.compressor.step_or_default(self.consensus_step, num_params)

    def init(self, rank: Rank, params: Tensor) -> ChocoState:
        self.compressor.warn_of_step(self.consensus_step, rank, params.numel())
        replicas = {j: Replica(params) for j in self.topology.in_neighbors(rank, 0)}
        return ChocoState(rank=rank, params=params, replica=params, replicas=replicas)

    def payload_schema(self, params: Tensor) -> Mapping[str, TensorSpec]:
        return self.compressor.schema(params.numel())

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Increments, whole replicas, and reports of missing increments."""
        return {
            **super().schema(params),
            "params": self.exchanged(self.payload_schema(params)),
            "missed": MessageSpec(max_round=self.num_rounds),
        }

    def handle(self, state: ChocoState, event: Event, now: Seconds) -> list[Effect]:
        effects = super().handle(state, event, now)
        # Any event may have completed a round, in which an increment may be missing.
        return [*effects, *self._ask_for_missed(state)]

    def receive(
        self, state: ChocoState, sender: Rank, message: Message, now: Seconds
    ) -> list[Effect]:
        if sender not in state.replicas:
            return []  # not a neighbor
        match message.kind:
            case "missed":
                # It gets the whole replica, unless it has timed out ahead of this worker, whose
                # increment is then on its way.
                has_sent = message.round < state.round + state.is_exchanging
                return self.help_to_catch_up(state, sender, now) if has_sent else []
            case "catch-up":
                state.replicas[sender].restart(message)
            case _:
                # Before the base drops it, if it is late: a replica needs all increments.
                state.replicas[sender].hear(message)
        return super().receive(state, sender, message, now)

    def replaces(self, newer: Message, older: Message) -> bool:
        """False: a neighbor in an earlier round needs each increment in its round."""
        return False

    def lose(self, state: ChocoState, rank: Rank) -> None:
        if rank in state.replicas:
            state.replicas[rank].forget()

    def learn(self, state: ChocoState, trained: Trained) -> None:
        super().learn(state, trained)
        key = (self.seed, state.rank, "increment", state.round)
        state.increment = self.compressor.compress(state.params - state.replica, *key)
        told = self.compressor.decompress(state.increment, state.params.numel())
        # What neighbors decode, not what was meant: both ends keep the same replica, and the
        # compression error is part of the next difference.
        state.replica = state.replica + told

    def outgoing(self, state: ChocoState, receiver: Rank) -> Payload:
        return state.increment

    def mix(self, state: ChocoState, inbox: Mapping[Rank, Payload]) -> None:
        weights = self.mixing.weights(self.topology, state.rank, state.round)
        # Not `inbox`: an increment that filled a gap late counts, too.
        pull = torch.zeros_like(state.params)
        for j, replica in state.replicas.items():
            if replica.advance(state.round, self.compressor):
                pull.add_(replica.params - state.replica, alpha=weights[j])
            # A neighbor that this worker does not wait for will announce its replica itself.
            elif j not in state.lost and state.first_exchange.get(j, 0) <= state.round:
                state.missed.append(j)
        state.params = state.params + self.step(pull.numel()) * pull

    # Lost increments, and workers that come back.

    def _ask_for_missed(self, state: ChocoState) -> list[Effect]:
        asked: list[Effect] = []
        # A replica that nobody mixes with any more needs no repair.
        if state.round < self.num_rounds:
            asked += [Send(j, Message("missed", state.round - 1)) for j in state.missed]
        state.missed.clear()
        return asked

    def handed_over(self, state: ChocoState) -> Tensor:
        # Not the parameters: the returning worker and this one restart from one replica.
        return state.replica

    def catch_up_with(self, state: ChocoState, payload: Payload) -> None:
        state.params = state.replica = payload["params"]
