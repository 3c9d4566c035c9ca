"""DoubleSqueeze: all-reduce with compression on the way to the owners and on the way back."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgegossip.algorithms.gossip.overlap import Overlapping, OverlapState
from edgegossip.compression.compressor import Compressor, Identity
from edgegossip.contract import (
    MessageSpec,
    Payload,
    Rank,
    TensorSpec,
    Trained,
    by_origin,
    check_ranges,
)

CHECK_EVERY = 16
"""Rounds between two checksums of each chunk."""


@dataclass(slots=True, kw_only=True)
class HeldChunk:
    """A chunk at its holder, besides its entries in the model.

    Attributes:
        own: The holder's own progress, taken when it sends the rest to other holders, [entries
            of the chunk that this round exchanges].
        velocity: :math:`u`, [chunk].
        error: :math:`s`, steps that nobody has heard of yet, [chunk].
        update: :math:`p` of the last round, compressed; empty before there is one.
        asked: Workers that have asked for the whole chunk in this round, as keys.
        is_new: Whether the other workers' copies may differ, because this holder is new.
    """

    own: Tensor
    velocity: Tensor
    error: Tensor
    update: Payload = field(default_factory=dict)
    asked: dict[Rank, None] = field(default_factory=dict)
    is_new: bool = True


@dataclass(slots=True, kw_only=True)
class DoubleSqueezeState(OverlapState):
    """State of one worker; `params` is the shared model, :math:`x`.

    Attributes:
        error: :math:`e_i`, progress that no holder has heard of yet, [num_params].
        held: The chunks that this worker holds.
        holders: Each chunk's holder in this exchange.
        outdated: Chunks that may differ from the holder's, as keys.
    """

    error: Tensor
    held: dict[Rank, HeldChunk] = field(default_factory=dict)
    holders: dict[Rank, Rank] = field(default_factory=dict)
    outdated: dict[Rank, None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DoubleSqueeze(Overlapping[DoubleSqueezeState]):
    r"""Take local steps from one shared model; owners combine compressed progress by chunk.

    Worker :math:`j` owns chunk :math:`j`, which is every :math:`n`-th entry from entry
    :math:`j` on, so that each chunk has entries of all layers. In each round worker :math:`i`
    takes `local_steps` SGD steps from :math:`x + e_i`, the shared model plus the part of its
    own progress that it has not yet sent. They change the parameters by :math:`\Delta_i`. With
    compressor :math:`C`, outer momentum :math:`\beta` and outer learning rate :math:`\alpha`,
    for the entries of each chunk

    .. math::
        v_i &= e_i + \Delta_i, \quad q_i = C(v_i), \quad e_i = v_i - q_i \\
        g &= \tfrac{1}{n} \sum_i q_i, \quad u \leftarrow \beta u + g, \quad
        z = s + \alpha (g + \beta u) \\
        p &= C(z), \quad s \leftarrow z - p, \quad x \leftarrow x + p

    The workers compute the first line and send :math:`q_i` to the owner. The owner computes the
    second line, and sends :math:`p` to all. What compression holds back on the way to the owner
    stays in :math:`e_i`, and on the way back in :math:`s`. The owner's own progress needs no
    compression: its :math:`q_i` is :math:`v_i`. Without faults, all progress arrives in the
    end, and all workers have the same :math:`x`, bit for bit.

    With `overlap`, the last of a round's steps run while its messages travel, as few as take
    as long as these do (`Overlap`). They start from all of the worker's own progress, and the
    others' arrives meanwhile: :math:`x \leftarrow x + p` changes what the next steps start
    from, and nothing of the worker's own is lost. Nobody waits for messages unless an exchange
    takes longer than a round's training. Others' progress then counts at least one step and at
    most a round later, and one more round without training brings the last of it. So with
    several workers, this is not `DiLoCo`, however short exchanges are.

    While an owner is absent, another worker *holds* its chunk. :doc:`Algorithms
    </docs/algorithms>` describes how copies that differ after faults become equal again.

    Without compression and overlap, and while no worker or message is lost, this is `DiLoCo` on
    the complete graph up to rounding, and with :math:`\beta = 0` and :math:`\alpha = 1` also
    `AllReduce`. A single worker without compression is `DiLoCo` alone, even with overlap.

    Args:
        topology: The complete graph.
        num_rounds: Number of rounds of training and averaging.
        local_steps: SGD steps in a round, at least 1.
        compressor: :math:`C`; `PerLayer` does not fit, because chunks have entries of all
            layers.
        outer_momentum: :math:`\beta`, in [0, 1). Momentum lengthens steps by a factor of
            :math:`1 / (1 - \beta)`, so reduce the learning rate.
        outer_lr: :math:`\alpha`, above 0.
        overlap: Whether the last of a round's steps run beside its exchange.
        timeout: See `Synchronous`.
        seed: Seeds compressors that draw at random.

    Raises:
        ValueError: If the topology is not complete or a number is out of range.

    References:
        Tang, Yu, Lian, Zhang and Liu, "DoubleSqueeze: Parallel Stochastic Gradient Descent with
        Double-Pass Error-Compensated Compression", ICML 2019, arXiv:1905.05957, Algorithm 1.
        Departures: every worker is the server of a chunk, and does not compress its own
        progress there; progress of local steps in place of gradients, and training from
        :math:`x + e_i`; Nesterov's momentum and a learning rate at the owners, as in DiLoCo
        (Douillard et al., 2023, arXiv:2311.08105), but not for statistics; holders;
        the overlap, with a delay of at most one round, as in DiLoCo with eager updates (Kale
        et al., 2025, arXiv:2502.12996).

    >>> from edgegossip.compression.sparse import TopK
    >>> from edgegossip.contract.topology import complete
    >>> squeezed = DoubleSqueeze(topology=complete(3), num_rounds=9, compressor=TopK(0.3))
    >>> state = squeezed.init(0, torch.zeros(7))
    >>> state.error = torch.tensor([9.0, 1.0, 8.0, 7.0, 4.0, 6.0, 5.0])
    >>> message = squeezed.outgoing(state, 1)  # worker 1 owns entries 1 and 4, and hears of one
    >>> state.error
    tensor([9., 1., 8., 7., 0., 6., 5.])
    """

    compressor: Compressor = Identity()
    outer_momentum: float = 0.7
    outer_lr: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, outer_momentum="in [0, 1)", outer_lr="above 0")

    def init(self, rank: Rank, params: Tensor) -> DoubleSqueezeState:
        nothing = torch.zeros_like(self._view(params, rank))
        return DoubleSqueezeState(
            rank=rank,
            params=params,
            error=torch.zeros_like(params),
            held={rank: HeldChunk(own=nothing, velocity=nothing, error=nothing, is_new=False)},
            holders={each: each for each in range(self.num_workers)},
        )

    def start(self, state: DoubleSqueezeState) -> Tensor:
        return state.params + state.error

    def learn(self, state: DoubleSqueezeState, trained: Trained) -> None:
        state.overlap.note(trained.num_steps, trained.seconds)
        if trained.has_gone_back:
            # Nobody else went back, so all chunks are asked for.
            state.params = trained.params
            self._start_anew(state)
        else:
            state.error = state.error + trained.delta

    # Chunks.

    def chunk_size(self, numel: int) -> int:
        """Number of entries in a message about a chunk; shorter chunks get a zero."""
        return -(-numel // self.num_workers)

    def turn_size(self, numel: int) -> int:
        """Number of entries of a chunk in a message of one round."""
        return self.chunk_size(numel)

    def turn(self, state: DoubleSqueezeState) -> slice:
        """The entries of every chunk that this round exchanges."""
        return slice(0, self.chunk_size(state.params.numel()))

    def _view(self, vector: Tensor, chunk: Rank) -> Tensor:
        return vector[chunk :: self.num_workers]

    def _in_turn(self, state: DoubleSqueezeState, vector: Tensor, chunk: Rank) -> Tensor:
        return self._view(vector, chunk)[self.turn(state)]

    def _padded(self, entries: Tensor, size: int) -> Tensor:
        """A copy, as long as the entries of all chunks are in messages."""
        # `F.pad` would keep the stride of a single entry, which networks cannot send.
        padded = entries.new_zeros(size)
        padded[: len(entries)] = entries
        return padded

    def prepare(self, state: DoubleSqueezeState) -> None:
        """Begin to hold chunks whose owners are absent, and stop when they take part again."""
        # Only here and not when a loss is noticed, so that nobody's role changes between the
        # messages of an exchange and their mixing.
        for chunk, before in state.holders.items():
            holder = self.holder(state, chunk)
            if holder != state.rank:
                state.held.pop(chunk, None)
                if holder != before:
                    # The new holder's copy may differ from the old one's.
                    state.outdated[chunk] = None
            else:
                state.outdated.pop(chunk, None)
                if chunk not in state.held:
                    nothing = torch.zeros_like(self._view(state.params, chunk))
                    state.held[chunk] = HeldChunk(own=nothing, velocity=nothing, error=nothing)
            state.holders[chunk] = holder
        if self.is_first(state):
            for chunk, held in state.held.items():
                # It needs no compression, so nothing is held back. Taken now, not when others'
                # progress has arrived, as training may end in between.
                own = self._in_turn(state, state.error, chunk)
                held.own = own.clone()
                own.zero_()

    # The two exchanges.

    def outgoing(self, state: DoubleSqueezeState, receiver: Rank) -> Payload:
        if self.is_first(state):
            found = {
                chunk: self._progress(state, chunk)
                for chunk, holder in state.holders.items()
                if holder == receiver
            }
        else:
            found = {
                chunk: self._news(state, chunk, held, receiver)
                for chunk, held in state.held.items()
            }
        return {
            f"{chunk}.{name}": tensor
            for chunk, payload in found.items()
            for name, tensor in payload.items()
        }

    def _progress(self, state: DoubleSqueezeState, chunk: Rank) -> Payload:
        """This worker's progress in a chunk; what compression holds back stays in `error`."""
        error = self._in_turn(state, state.error, chunk)
        wanted = self._padded(error, self.turn_size(state.error.numel()))
        key = (self.seed, state.rank, "progress", chunk, state.round)
        payload = self.compressor.compress(wanted, *key)
        # In place, as a view of `error`: this vector is the worker's own and never sent.
        error -= self.compressor.decompress(payload, len(wanted))[: len(error)]
        request = {"request": torch.empty(0, dtype=torch.uint8)}
        return {**payload, **request} if chunk in state.outdated else payload

    def _news(
        self, state: DoubleSqueezeState, chunk: Rank, held: HeldChunk, receiver: Rank
    ) -> Payload:
        """The update of a held chunk, or all of it if the receiver's copy may differ."""
        entries = self._view(state.params, chunk)
        if held.is_new or receiver in held.asked:
            # Only these receivers: a whole chunk takes as much as many compressed updates.
            return {"whole": self._padded(entries, self.chunk_size(state.params.numel()))}
        if (state.round + 1) % CHECK_EVERY:
            return held.update
        # Copies can differ although each update arrived, if its sender was cut off meanwhile.
        return {**held.update, "checksum": torch.tensor(_checksum(entries))}

    def mix(self, state: DoubleSqueezeState, inbox: Mapping[Rank, Payload]) -> None:
        arrived = {sender: by_origin(payload) for sender, payload in inbox.items()}
        state.params = state.params.clone()  # the old tensor may be in use elsewhere
        if self.is_first(state):
            for chunk, held in state.held.items():
                told = {j: each[chunk] for j, each in arrived.items() if chunk in each}
                # A request in this exchange is answered in the next one of this round.
                held.asked = {j: None for j, each in told.items() if "request" in each}
                vectors = (self._vector(state, chunk, each) for each in told.values())
                self._step(state, chunk, [each for each in vectors if each is not None])
            return
        for chunk, holder in state.holders.items():
            if chunk not in state.held:
                self._adopt(state, chunk, arrived.get(holder, {}).get(chunk, {}))
        for held in state.held.values():
            held.is_new = False  # all have got the whole chunk, or will ask for it

    def _vector(
        self, state: DoubleSqueezeState, chunk: Rank, payload: Payload
    ) -> Tensor | None:
        """Decompress a payload about a chunk; None if it is not complete."""
        size = self.turn_size(state.params.numel())
        if not self.compressor.schema(size).keys() <= payload.keys():
            return None
        length = len(self._in_turn(state, state.params, chunk))
        return self.compressor.decompress(payload, size)[:length]

    def _step(self, state: DoubleSqueezeState, chunk: Rank, arrived: Sequence[Tensor]) -> None:
        """Step by the mean progress in a chunk that this worker holds; compress the step."""
        held, turn = state.held[chunk], self.turn(state)
        # Over those that arrived: a missing worker's progress stays in its error memory only if
        # its message was never sent.
        mean = torch.stack([held.own, *arrived]).mean(0)
        velocity = torch.add(mean, held.velocity[turn], alpha=self.outer_momentum)
        step = torch.add(mean, velocity, alpha=self.outer_momentum).mul_(self.outer_lr)
        if state.layout is not None:
            # Statistics have no momentum: extrapolated, a variance could become negative.
            places = turn.start + torch.arange(len(mean), device=mean.device)
            places = chunk + self.num_workers * places
            step = torch.where(places < state.layout.num_trained, step, mean)
        key = (self.seed, state.rank, "update", chunk, state.round)
        size = self.turn_size(state.params.numel())
        padded, error = self._padded(step, size), self._padded(held.error[turn], size)
        fed_back = self.compressor.feed_back(padded, error, *key)
        held.update = fed_back.payload
        # New tensors: a checkpoint may hold the old ones.
        held.velocity, held.error = held.velocity.clone(), held.error.clone()
        held.velocity[turn], held.error[turn] = velocity, fed_back.error[: len(mean)]
        self._in_turn(state, state.params, chunk).add_(fed_back.sent[: len(mean)])

    def _adopt(self, state: DoubleSqueezeState, chunk: Rank, payload: Payload) -> None:
        """Take over what a chunk's holder has sent."""
        copy, update = self._view(state.params, chunk), self._vector(state, chunk, payload)
        if "whole" in payload:
            copy.copy_(payload["whole"][: len(copy)])
            state.outdated.pop(chunk, None)
        elif update is None:  # nothing came, or not from the holder that this worker knows
            state.outdated[chunk] = None
        else:
            copy[self.turn(state)] += update
            if "checksum" in payload and int(payload["checksum"]) != _checksum(copy):
                state.outdated[chunk] = None

    def payload_schema(self, params: Tensor) -> Mapping[str, TensorSpec]:
        return {}  # all is optional: a worker that holds no chunk has nothing to send

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Compressed chunks, requests for whole ones, whole ones, and checksums."""
        size = self.chunk_size(params.numel())
        each = {
            **self.compressor.schema(self.turn_size(params.numel())),
            "request": TensorSpec(torch.uint8, (0,)),
            "whole": TensorSpec(params.dtype, (size,)),
            "checksum": TensorSpec(torch.int64, (), minimum=0, maximum=2**32 - 1),
        }
        optional = {
            f"{chunk}.{name}": spec
            for chunk in range(self.num_workers)
            for name, spec in each.items()
        }
        return {**super().schema(params), "params": self.exchanged({}, optional)}

    # Losses and returns.

    def rejoin(self, state: DoubleSqueezeState) -> None:
        self._start_anew(state)

    def lose(self, state: DoubleSqueezeState, rank: Rank) -> None:
        # If it comes back before the next exchange, it continues from another copy.
        held = (chunk for chunk, holder in state.holders.items() if holder == rank)
        state.outdated |= dict.fromkeys(held)

    def catch_up_with(self, state: DoubleSqueezeState, payload: Payload) -> None:
        super().catch_up_with(state, payload)
        self._start_anew(state)

    def _start_anew(self, state: DoubleSqueezeState) -> None:
        """Continue from parameters that may differ from the others'."""
        state.error = torch.zeros_like(state.params)
        state.held, state.outdated = {}, dict.fromkeys(range(self.num_workers))


def _checksum(entries: Tensor) -> int:
    return zlib.crc32(entries.cpu().numpy().tobytes())
