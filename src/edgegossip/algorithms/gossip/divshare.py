"""DivShare: fragments of the model, sent to random workers during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from edgegossip.algorithms.gossip.paced import Paced, PacedState
from edgegossip.contract import (
    Effect,
    Message,
    MessageSpec,
    Rank,
    Seconds,
    TensorSpec,
    Trained,
    check_counts,
    check_ranges,
)
from edgegossip.contract.randomness import generator


@dataclass(slots=True, kw_only=True)
class DivShareState(PacedState):
    """State of one worker.

    Attributes:
        model: Model at the end of the last block, before averaging; fragments of it are sent,
            [num_params].
        queue: Fragments that are still to be sent, by receiver.
        inbox: The newest message of each sender since the last block, by fragment and sender.
        unknown: Fragments of a worker that has come back and not yet heard of them, as keys.
    """

    model: Tensor
    queue: dict[Rank, list[int]] = field(default_factory=dict)
    inbox: dict[int, dict[Rank, Message]] = field(default_factory=dict)
    unknown: dict[int, None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DivShare(Paced[DivShareState]):
    r"""Send each fragment of the model to a few random workers, and average what has come.

    The model is cut into :math:`1 / \Omega` fragments. Worker :math:`i` repeats:

    .. code-block:: text

        for each fragment k:                                     # average
            x_i[k] = mean of x_i[k] and the x_s[k] that came since the last block
        x_i -= eta * gradient(x_i), local_steps times            # train
        for each fragment k, in random order:                    # send, during the next block
            put (k, j) into the queue for J random workers j

    Nobody waits. Fragments leave one after another while training goes on; the next one for a
    receiver leaves when it has acknowledged the last one. At the end of a block, fragments of
    the newer model, in a new random order, replace those that are still in the queue. A slow
    link therefore always carries fragments of a recent model, and a slow receiver delays nobody
    else. If a fragment comes twice from one sender in a block, its newest values count.

    After its last block a worker sends the rest of its queue, and averages each fragment that
    still comes as if it were in a block of its own.

    A lost message costs only its information. Averaging does not keep the mean of the workers,
    because not all of them hear the same. A worker that comes back takes over each fragment
    from the first workers that it hears of it; until then, its own fragments count only for
    others that have also just come back.

    A block sends at most :math:`J` models. A worker keeps one more model, and the fragments
    that have come, at most one model of each other worker.

    Args:
        topology: Possible receivers; the complete graph in the paper. May vary with the
            worker's own rounds.
        num_rounds: Blocks that each worker trains before it finishes.
        exchange_probability: Probability of sending after each block, in [0, 1]; 1 in the
            paper.
        local_steps: SGD steps in a block.
        num_fragments: :math:`1 / \Omega`, at least 1.
        num_receivers: :math:`J`, at least 1.
        timeout: Seconds after which a fragment without acknowledgement counts as lost, so that
            the next one is sent; None for never, which is safe only on lossless links.
        seed: Seeds the random choices.

    Raises:
        ValueError: If a number is out of range, or a count is not whole.

    References:
        Biswas, Kermarrec, Marouani, Pires, Sharma & de Vos, "Boosting Asynchronous
        Decentralized Learning with Model Fragmentation", WWW 2025, arXiv:2410.12918. We have
        the abstract and recall the algorithm. Recalled: :math:`\Omega = 0.1`; unsent fragments
        are replaced at the end of a block. Departures: acknowledgements, because an algorithm
        does not see its link; fragments are consecutive entries; only the newest values of each
        sender count; lost and returning workers; the default of :math:`J`.
    """

    num_fragments: int = 10
    num_receivers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "num_fragments", "num_receivers")
        check_ranges(self, num_fragments="at least 1", num_receivers="at least 1")

    def init(self, rank: Rank, params: Tensor) -> DivShareState:
        return DivShareState(rank=rank, params=params, model=params)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Fragments by number, and acknowledgements."""
        numel = params.numel()
        lengths = {k: self._entries(k, numel) for k in range(self.num_fragments)}
        fragments = {
            str(k): TensorSpec(params.dtype, (part.stop - part.start,))
            for k, part in lengths.items()
        }
        fragment = MessageSpec(
            optional=fragments,
            optional_numbers={"is_new": range(1, 2)},
            max_round=self.num_rounds,
        )
        return {"fragment": fragment, **self.acknowledgement()}

    def start(self, state: DivShareState, has_rejoined: bool) -> None:
        if has_rejoined:
            state.unknown = dict.fromkeys(range(self.num_fragments))

    def learn(self, state: DivShareState, trained: Trained, now: Seconds) -> list[Effect]:
        state.params = state.model = trained.params
        if trained.has_gone_back:
            state.inbox = {}  # it may hold more of what has made the parameters unsound
        self._fill_queue(state)
        state.round += 1
        # After the queue: others get this worker's own model, not the average.
        self._average(state)
        return [*self.send(state, sorted(state.queue), now), *self.go_on(state)]

    def next_message(self, state: DivShareState, receiver: Rank) -> Message | None:
        fragments = state.queue.get(receiver)
        if not fragments:
            return None
        k = fragments.pop(0)
        values = state.model[self._entries(k, state.model.numel())]
        numbers = {"is_new": 1} if k in state.unknown else {}
        return Message("fragment", state.round, {str(k): values}, numbers)

    def take(self, state: DivShareState, sender: Rank, message: Message) -> None:
        for name in message.payload:
            heard = state.inbox.setdefault(int(name), {})
            if sender not in heard or heard[sender].round <= message.round:
                heard[sender] = message
        if state.has_finished:  # no block will end any more
            self._average(state)

    def lose(self, state: DivShareState, rank: Rank) -> list[Effect]:
        state.queue.pop(rank, None)
        return super().lose(state, rank)

    def forget(self, state: DivShareState, rank: Rank) -> None:
        for heard in state.inbox.values():
            heard.pop(rank, None)

    def _fill_queue(self, state: DivShareState) -> None:
        receivers, state.queue = self.reachable(state), {}
        draws = generator(self.seed, state.rank, "fragments", state.round)
        for k in torch.randperm(self.num_fragments, generator=draws).tolist():
            part = self._entries(k, state.model.numel())
            if part.start == part.stop:
                continue  # the model has fewer entries than fragments
            places = torch.randperm(len(receivers), generator=draws)[: self.num_receivers]
            for place in places.tolist():
                state.queue.setdefault(receivers[place], []).append(k)

    def _average(self, state: DivShareState) -> None:
        params, was_unknown = state.params.clone(), len(state.unknown)
        for k, heard in sorted(state.inbox.items()):
            part = self._entries(k, params.numel())
            # Rank order: float sums come out bit-identical everywhere.
            messages = [heard[rank] for rank in sorted(heard)]
            trusted = [each for each in messages if "is_new" not in each.numbers]
            values = [params[part]]
            if k in state.unknown and trusted:
                # Its own values are those of the start of the run, trained for a few steps.
                del state.unknown[k]
                values = []
            elif k in state.unknown:
                trusted = messages  # all of them have just come back
            values += [each.payload[str(k)] for each in trusted]
            params[part] = torch.stack(values).mean(0)
        state.params, state.inbox = params, {}
        if len(state.unknown) < was_unknown:
            # Otherwise its next messages would have the old values, and no longer say so.
            state.model = params

    def _entries(self, k: int, numel: int) -> slice:
        """The entries of fragment `k`; fragments' lengths differ by at most one."""
        return slice(k * numel // self.num_fragments, (k + 1) * numel // self.num_fragments)
