"""AllReduce: exact averaging after every block, by a reduce-scatter and an all-gather."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.algorithms.gossip.owned_chunks import OwnedChunks
from edgegossip.contract import MessageSpec, Payload, Rank, RoundState, TensorSpec


@dataclass(slots=True, kw_only=True)
class AllReduceState(RoundState):
    """State of one worker.

    Attributes:
        averaged_in: The exchange in which the worker last averaged chunks; -1 for none.
    """

    averaged_in: int = -1


@dataclass(frozen=True, kw_only=True)
class AllReduce(OwnedChunks[AllReduceState]):
    r"""Average all workers' parameters exactly after every block of local steps.

    .. math:: x_i \leftarrow \frac{1}{n} \sum_{j=1}^{n} x_j

    Averaging takes two exchanges. The vector is cut into :math:`n` chunks and worker :math:`i`
    owns chunk :math:`i`. In the first exchange every worker sends each chunk to its owner,
    which averages the copies that arrive. In the second exchange the owners send the averages
    to all. Each worker sends :math:`2 (n - 1) / n` vectors, the minimum possible, and all
    workers end with the same result, bit for bit.

    With SGD (also with momentum and weight decay), equal batch sizes and one local step, this
    is single-machine SGD on the union of the workers' batches, because the update is linear in
    the gradients. The equality does not hold for optimizers with a nonlinear update, such as
    Adam.

    While a worker is lost, or is back but still in an earlier round, the next worker in order
    of rank averages its chunk as well. If the loss is noticed between the two exchanges, all
    take over the next worker's own version of this chunk. A worker that comes back between the
    two exchanges has averaged nothing and sends an empty chunk. A chunk of the wrong length is
    ignored.

    Args:
        topology: The complete graph.
        num_rounds: Number of rounds of training and averaging.
        local_steps: SGD steps between two averagings.
        timeout: See `Synchronous`.

    Raises:
        ValueError: If the topology is not complete or a number is out of range.

    References:
        Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", JPDC 2009. Departure: chunks travel directly between all pairs instead
        of around a ring, which costs the same number of bytes but only two latencies.
    """

    def init(self, rank: Rank, params: Tensor) -> AllReduceState:
        return AllReduceState(rank=rank, params=params)

    def outgoing(self, state: AllReduceState, receiver: Rank) -> Payload:
        chunks = state.params.tensor_split(self.num_workers)
        is_first = self.is_first(state)
        owner = receiver if is_first else state.rank
        if not is_first and state.averaged_in < state.exchange - 1:
            # It came back between the two exchanges, and has averaged nothing. The receivers
            # wait for a message all the same.
            return {"chunk": chunks[owner][:0]}
        held = {_name(k): chunks[k] for k in self._held(state, owner)[1:]}
        return {"chunk": chunks[owner], **held}

    def _held(self, state: AllReduceState, holder: Rank) -> list[Rank]:
        """Chunks that a worker averages: its own, and those of absent workers before it."""
        # Only workers that have been lost can be absent: this is called for every receiver.
        been_lost = sorted(state.first_exchange)
        return [
            holder,
            *(k for k in been_lost if self.holder(state, k) == holder and k != holder),
        ]

    def payload_schema(self, params: Tensor) -> Mapping[str, TensorSpec]:
        largest = params.tensor_split(self.num_workers)[0]
        return {"chunk": TensorSpec(params.dtype, (None,), max_numel=largest.numel())}

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Own chunks, and those of absent workers."""
        required = self.payload_schema(params)
        optional = {_name(k): required["chunk"] for k in range(self.num_workers)}
        return {**super().schema(params), "params": self.exchanged(required, optional)}

    def mix(self, state: AllReduceState, inbox: Mapping[Rank, Payload]) -> None:
        chunks = list(state.params.tensor_split(self.num_workers))
        if self.is_first(state):
            for k in self._held(state, state.rank):
                name = "chunk" if k == state.rank else _name(k)
                # Copies of the right length only: a liar's chunk must not end the run.
                copies = {state.rank: chunks[k]} | {
                    j: payload[name]
                    for j, payload in inbox.items()
                    if _fits(payload, name, chunks[k])
                }
                chunks[k] = torch.stack([copies[j] for j in sorted(copies)]).mean(0)
            state.averaged_in = state.exchange
        else:
            chunks = [self._combined(state, k, own, inbox) for k, own in enumerate(chunks)]
        state.params = torch.cat(chunks)

    def _combined(
        self, state: AllReduceState, k: Rank, own: Tensor, inbox: Mapping[Rank, Payload]
    ) -> Tensor:
        """Chunk `k` from its owner, or else from the first worker that stands in for it."""
        has_averaged = state.averaged_in == state.exchange - 1
        for j in self.successors(k):
            name = "chunk" if j == k else _name(k)
            if _fits(inbox.get(j, {}), name, own):
                return inbox[j][name]
            # This worker's own average, unless one before it in the order has sent its own: all
            # take the same one.
            if j == state.rank and has_averaged and self.holder(state, k) == j:
                break
        return own


def _name(chunk: Rank) -> str:
    """The name of an absent worker's chunk in a message."""
    return f"{chunk}.chunk"


def _fits(payload: Payload, name: str, chunk: Tensor) -> bool:
    # Chunks differ in length, by one at most; the schema cannot tell them apart.
    return name in payload and len(payload[name]) == len(chunk)
