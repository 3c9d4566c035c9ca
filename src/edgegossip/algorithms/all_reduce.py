"""AllReduce: exact averaging after every block, by a reduce-scatter and an all-gather."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edgegossip.algorithms.owned_chunks import OwnedChunks
from edgegossip.algorithms.rounds import RoundState
from edgegossip.core.protocol import Payload, Rank
from edgegossip.core.schema import TensorSpec


@dataclass(slots=True, kw_only=True)
class AllReduceState(RoundState):
    """State of one worker.

    Attributes:
        averaged_in: The exchange in which the worker last averaged its own chunk; -1 for none.
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

    If a worker is lost, the others keep their own versions of the lost worker's chunk until the
    chunk is averaged again. A worker that comes back between the two exchanges has averaged
    nothing and sends an empty chunk. A chunk of the wrong length is ignored.

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
        if self.is_first(state):
            return {"chunk": chunks[receiver]}
        own, has_averaged = chunks[state.rank], state.averaged_in == state.exchange - 1
        return {"chunk": own if has_averaged else own[:0]}

    def payload_schema(self, params: Tensor) -> Mapping[str, TensorSpec]:
        largest = params.tensor_split(self.num_workers)[0]
        return {"chunk": TensorSpec(params.dtype, (None,), max_numel=largest.numel())}

    def mix(self, state: AllReduceState, inbox: Mapping[Rank, Payload]) -> None:
        chunks = list(state.params.tensor_split(self.num_workers))
        is_scattering = self.is_first(state)
        own = chunks[state.rank]
        arrived = {
            j: payload["chunk"]
            for j, payload in inbox.items()
            # Chunks differ in length, by one at most; the schema cannot tell them apart.
            if len(payload["chunk"]) == len(own if is_scattering else chunks[j])
        }
        if is_scattering:
            copies = {state.rank: own} | arrived
            chunks[state.rank] = torch.stack([copies[j] for j in sorted(copies)]).mean(0)
            state.averaged_in = state.exchange
        else:
            for j, chunk in arrived.items():
                chunks[j] = chunk
        state.params = torch.cat(chunks)
