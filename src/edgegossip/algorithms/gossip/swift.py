"""SWIFT: mix with the last known model of each neighbor, and never wait."""

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
    MetropolisHastings,
    MixingRule,
    Rank,
    RobustRule,
    Seconds,
    Trained,
    robust_field,
)


@dataclass(slots=True, kw_only=True)
class SWIFTState(PacedState):
    """State of one worker.

    Attributes:
        model: The model that neighbors are to have, [num_params].
        offered: Round of `model`; 0 if there is none yet.
        sent: Round of the last model sent to each neighbor.
        models: The last model of each neighbor, in its message.
        is_new: Whether the worker has come back and has not yet heard of a neighbor's model.
    """

    model: Tensor
    offered: int = 0
    sent: dict[Rank, int] = field(default_factory=dict)
    models: dict[Rank, Message] = field(default_factory=dict)
    is_new: bool = False


@dataclass(frozen=True, kw_only=True)
class SWIFT(Paced[SWIFTState]):
    r"""After each block, send the model to the neighbors and mix with their last known models.

    After a block of local steps, worker :math:`i` offers its :math:`x_i` to all neighbors, and
    mixes it with the newest models :math:`\hat x_j` that it has from them, whatever their age:

    .. math::
        x_i \leftarrow W_{ii} x_i + \sum_{j \in N(i)} W_{ij} \hat x_j

    Nobody waits. A neighbor whose link still carries an earlier model gets the newest one when
    it has acknowledged that one. The weight of a neighbor that is lost, or whose model has not
    come yet, goes to the worker's own model.

    A model counts again in each block until a newer one comes, so a finished or slow worker's
    last model keeps pulling its neighbors. The mean of all workers is not kept. If all workers
    are equally fast and links take less than a block, this is `Gossip` with neighbors' models
    of the round before.

    A block sends at most one model to each neighbor. A worker keeps one model of each neighbor,
    and one more of its own. A lost message costs only its information. A worker that comes back
    takes over the mean of the first models that it has from neighbors; until then, its own
    counts only for others that have also just come back.

    Args:
        topology: Undirected communication graph; may vary with the worker's own rounds.
        num_rounds: Blocks that each worker trains before it finishes.
        exchange_probability: Probability of offering the model after each block, in [0, 1]; 1
            in the paper.
        local_steps: SGD steps in a block.
        mixing: Rule that gives the rows of :math:`W`.
        robust: See `NeighborAveraging`; not used while a returned worker takes over a model.
        timeout: Seconds after which a model without acknowledgement counts as lost, so that the
            next one is sent; None for never, which is safe only on lossless links.
        seed: Seeds the random choices.

    Raises:
        ValueError: If the topology is directed, the rule does not average, or a number is out
            of range.

    References:
        Bornstein, Rabbani, Wang, Bedi & Huang, "SWIFT: Rapid Decentralized Federated Learning
        via Wait-Free Model Communication", ICLR 2023, arXiv:2210.14026, compared with the
        authors' code (the variant that stores models). Departures: workers train from the mixed
        model, while the code computes a gradient before mixing and applies it afterwards;
        models are sent and mixed after each block, while the code sends them after each step;
        Metropolis-Hastings weights instead of the paper's, which depend on how often each
        worker is active; a neighbor that has not been heard has no weight, while the code mixes
        with its initial model; the newest model replaces those that a link has not carried yet;
        lost and returning workers; no change of the number of local steps during training.
    """

    mixing: MixingRule = MetropolisHastings()
    robust: RobustRule | None = robust_field()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology.is_directed:
            raise ValueError(
                f"SWIFT needs an undirected topology, got {self.topology!r}; choose an "
                "undirected one, or a push-sum algorithm"
            )
        if not self.mixing.has_averaging_rows:
            raise ValueError(
                "SWIFT averages: rows of its mixing matrix must add up to 1; "
                f"{self.mixing} is for push-sum, choose MetropolisHastings() or Uniform()"
            )

    def init(self, rank: Rank, params: Tensor) -> SWIFTState:
        return SWIFTState(rank=rank, params=params, model=params)

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Models, and acknowledgements."""
        model = MessageSpec(
            {"params": params},
            optional_numbers={"is_new": range(1, 2)},
            max_round=self.num_rounds,
        )
        return {"model": model, **self.acknowledgement()}

    def start(self, state: SWIFTState, has_rejoined: bool) -> None:
        state.is_new = has_rejoined

    def learn(self, state: SWIFTState, trained: Trained, now: Seconds) -> list[Effect]:
        state.params = trained.params
        if trained.has_gone_back:
            state.models = {}  # one of them may have made the parameters unsound
        receivers = self.reachable(state)
        own = state.params  # others get this worker's own model, not the mixed one
        was_new = state.is_new
        notes = self._mix(state)
        state.round += 1
        if receivers:
            has_taken_over = was_new and not state.is_new
            state.model, state.offered = state.params if has_taken_over else own, state.round
        return [*notes, *self.send(state, receivers, now), *self.go_on(state)]

    def next_message(self, state: SWIFTState, receiver: Rank) -> Message | None:
        if state.sent.get(receiver, 0) >= state.offered:
            return None
        state.sent[receiver] = state.offered
        numbers = {"is_new": 1} if state.is_new else {}
        return Message("model", state.offered, {"params": state.model}, numbers)

    def take(self, state: SWIFTState, sender: Rank, message: Message) -> None:
        # The last one to arrive, not the one with the highest round: a neighbor that comes back
        # counts its rounds from 0.
        state.models[sender] = message

    def lose(self, state: SWIFTState, rank: Rank) -> list[Effect]:
        state.models.pop(rank, None)
        state.sent.pop(rank, None)  # a returning worker has no memory of it
        return super().lose(state, rank)

    def _mix(self, state: SWIFTState) -> list[Effect]:
        trusted = {j: m for j, m in state.models.items() if "is_new" not in m.numbers}
        usable = state.models if state.is_new and not trusted else trusted
        weights = self.mixing.weights(self.graph(state), state.rank, state.round, state.lost)
        # Rank order, as in the row of weights: float sums come out bit-identical everywhere.
        shares = {j: weights[j] for j in weights if j in usable and j not in state.lost}
        if not shares:
            return []
        own = 1 - sum(shares.values())
        if state.is_new and trusted:
            # Its own model is that of the start of the run, trained for a few steps.
            shares = {j: share / (1 - own) for j, share in shares.items()}
            own, state.is_new = 0.0, False
        elif self.robust is not None:
            models = {j: usable[j].payload["params"] for j in shares}
            mix = self.robust.combine(state.params, models, shares)
            state.params = mix.params
            return [mix.note]
        mixed = own * state.params
        for j, share in shares.items():
            mixed = torch.add(mixed, usable[j].payload["params"], alpha=share)
        state.params = mixed
        return []
