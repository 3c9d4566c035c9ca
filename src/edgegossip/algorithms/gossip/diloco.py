"""DiLoCo: many local steps, then momentum on the joint progress of all workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from edgegossip.compression.compressor import Compressor, Identity
from edgegossip.contract import (
    LocalSteps,
    MessageSpec,
    Payload,
    Rank,
    RobustRounds,
    RoundState,
    TensorSpec,
    Trained,
    by_origin,
    check_ranges,
)


@dataclass(slots=True, kw_only=True)
class DiLoCoState(RoundState):
    r"""State of one worker; `params` is the shared model, :math:`x`.

    Attributes:
        velocity: :math:`u`, [num_params].
        error: :math:`e_i`, the part that compression has held back so far, [num_params].
        updates: Known updates of this round, by the worker that made them.
        known_to: By neighbor, the workers whose updates that neighbor already has, as keys.
        missing: Workers whose updates were missing at the end of the last round, as keys.
        repairs_until: Round before which updates include parts of the model.
        has_missed: Whether the worker's model may differ from the others', because it has come
            back, skipped rounds or gone back to sound parameters.
    """

    velocity: Tensor
    error: Tensor
    updates: dict[Rank, Payload] = field(default_factory=dict)
    known_to: dict[Rank, dict[Rank, None]] = field(default_factory=dict)
    missing: dict[Rank, None] = field(default_factory=dict)
    repairs_until: int = 0
    has_missed: bool = False


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSteps[DiLoCoState], RobustRounds[DiLoCoState]):
    r"""Take local steps from one shared model; every worker gets all compressed updates.

    In each round worker :math:`i` takes `local_steps` SGD steps, which change the parameters by
    :math:`\Delta_i`. It starts from :math:`x + e_i`: the shared model plus the part of its own
    progress that it has not yet sent. With compressor :math:`C`, outer momentum :math:`\beta`
    and outer learning rate :math:`\alpha`

    .. math::
        v_i &= e_i + \Delta_i, \quad q_i = C(v_i), \quad e_i = v_i - q_i \\
        g &= \tfrac{1}{n} \sum_{j} q_j, \quad u \leftarrow \beta u + g, \quad
        x \leftarrow x + \alpha (g + \beta u)

    *Flooding* brings every :math:`q_j` to every worker. A round has as many exchanges as this
    takes on the graph (7 in a directed ring of 8, 1 in a complete graph), and in each exchange
    a worker relays to each neighbor the updates that this neighbor may not know yet. On every
    graph that is strongly connected over its period, all workers therefore have the same
    :math:`x` and :math:`u`, bit for bit, so momentum can act on them. In push-sum, where
    workers never quite agree, momentum over rounds would enlarge their differences.

    Differences that lost messages and workers cause are repaired over the following rounds, as
    :doc:`Algorithms </docs/algorithms>` describes.

    Without compression, and with :math:`\beta = 0` and :math:`\alpha = 1`, this is exact
    averaging every `local_steps` steps.

    Args:
        topology: Graph of each exchange's messages; may be directed and vary in time.
        num_rounds: Number of rounds of training and flooding.
        local_steps: SGD steps in a round, at least 1.
        compressor: :math:`C`.
        outer_momentum: :math:`\beta`, in [0, 1). Momentum lengthens steps by a factor of
            :math:`1 / (1 - \beta)`, so halve the learning rate.
        outer_lr: :math:`\alpha`, above 0.
        robust: Rule that takes the place of the mean of the updates, such as `NormBound`; all
            workers apply it to the same updates, so they stay equal. Repairs then take the
            median of the parts. None averages.
        repair_rounds: Number of parts in which the model is sent to repair differences; fewer
            if the run ends before that.
        timeout: See `Synchronous`; must be well above the duration of a round of training.
        seed: Seeds compressors that draw at random.

    Raises:
        ValueError: If some worker cannot reach all others over the topology's period, or a
            number is out of range.

    References:
        Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
        2023, arXiv:2311.08105, Algorithm 1, with compressed updates and error feedback as in
        Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
        arXiv:2508.15706. Departures: no server and no all-reduce, but flooding over any graph;
        the inner optimizer is the task's; the outer one is Nesterov's momentum as in DiLoCo;
        the error memory is that of `SparseLoCo`, but it affects training and does not decay;
        repairs.
    """

    compressor: Compressor = Identity()
    outer_momentum: float = 0.7
    outer_lr: float = 1.0
    repair_rounds: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(
            self, repair_rounds="at least 1", outer_momentum="in [0, 1)", outer_lr="above 0"
        )
        self.topology.require_connected()

    @property
    def exchanges_per_round(self) -> int:
        """Number of exchanges until every update has reached every worker."""
        return self.topology.flooding_time

    def init(self, rank: Rank, params: Tensor) -> DiLoCoState:
        nothing = torch.zeros_like(params)
        return DiLoCoState(rank=rank, params=params, velocity=nothing, error=nothing)

    def start(self, state: DiLoCoState) -> Tensor:
        # What was held back is part of this worker's progress, so it goes on from there.
        return state.params + state.error

    def learn(self, state: DiLoCoState, trained: Trained) -> None:
        key = (self.seed, state.rank, "update", state.round)
        delta = trained.delta
        if trained.has_gone_back:
            # It continues from parameters that differ from the others', and must report it.
            state.params, state.has_missed = trained.params, True
            delta = state.velocity = state.error = torch.zeros_like(trained.params)
        is_due = state.has_missed or state.missing.keys() != state.lost.keys()
        # A repair is usually reported in one round and begins in the next, so that all send
        # their parts together. After the last round, there is no next one.
        if is_due and self._is_last(state.round):
            state.repairs_until = self._end_of_repairs(state.round)
        turn = self.compressor.feed_back(delta, state.error, *key)
        update, state.error = turn.payload, turn.error
        if state.round < state.repairs_until:
            # A tensor and not a number of the message, because others relay it with the update.
            until = torch.tensor(state.repairs_until)
            update = {**update, "part": self._own_part(state), "until": until}
        state.updates[state.rank] = update

    # Flooding.

    def outgoing(self, state: DiLoCoState, receiver: Rank) -> Payload:
        # Sent once on each link: a message that is lost is not sent again, because the round
        # ends with the timeout. The repair makes up for it.
        known = state.known_to.setdefault(receiver, {})
        news = [rank for rank in state.updates if rank not in known and rank != receiver]
        known.update(dict.fromkeys(news))
        return {
            f"{rank}.{name}": tensor
            for rank in sorted(news)
            for name, tensor in state.updates[rank].items()
        }

    def mix(self, state: DiLoCoState, inbox: Mapping[Rank, Payload]) -> None:
        passed_on: list[tuple[Rank, Payload]] = []
        for sender, payload in inbox.items():
            known = state.known_to.setdefault(sender, {})
            for rank, update in by_origin(payload).items():
                known[rank] = None
                if not self._is_sound(update, state.round, state.params.numel()):
                    continue
                if rank == sender:  # the sender's own statement has priority over relayed ones
                    state.updates[rank] = update
                else:
                    passed_on.append((rank, update))
        # The first of several relayed versions: they are equal, unless a relay lies.
        for rank, update in passed_on:
            state.updates.setdefault(rank, update)
        if (state.exchange + 1) % self.exchanges_per_round == 0:
            self._end_round(state)
            state.updates, state.known_to = {}, {}

    def _is_sound(self, update: Payload, round: int, numel: int) -> bool:
        """Whether the update is complete and consistent; `schema` has validated each tensor."""
        expected = set(self.compressor.schema(numel)) | ({"seal"} & update.keys())
        if "part" in update:
            part = self._part(round, numel)
            if update["part"].shape[1] != part.stop - part.start:
                return False
            expected |= {"part", "until"}
        return update.keys() == expected

    def payload_schema(self, params: Tensor) -> Mapping[str, TensorSpec]:
        return {}  # all is optional, because a worker may have no new update

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """Workers' updates, with parts of the model during a repair."""
        numel = params.numel()
        update = {
            **self.compressor.schema(numel),
            "part": TensorSpec(params.dtype, (2, None), max_numel=2 * numel),
            "until": TensorSpec(
                torch.int64, (), minimum=0, maximum=self._end_of_repairs(self.num_rounds)
            ),
        }
        updates = {
            f"{rank}.{name}": spec
            for rank in range(self.topology.num_workers)
            for name, spec in update.items()
        }
        params_spec = replace(self.exchanged({}, updates), is_passed_on=True)
        return {**super().schema(params), "params": params_spec}

    def rejoin(self, state: DiLoCoState) -> None:
        state.has_missed = True

    def catch_up_with(self, state: DiLoCoState, payload: Payload) -> None:
        super().catch_up_with(state, payload)
        # The updates gathered so far belong to a round that the worker skips.
        state.updates, state.known_to, state.has_missed = {}, {}, True

    # The end of a round.

    def _end_round(self, state: DiLoCoState) -> None:
        ranks = range(self.topology.num_workers)
        missing = dict.fromkeys(rank for rank in ranks if rank not in state.updates)
        is_complete = missing.keys() <= state.lost.keys()
        # A lost worker may have sent its update to some workers only, so models differ. So do
        # the models of a divided network when it is whole again.
        has_changed = missing.keys() != state.missing.keys()
        if has_changed or not is_complete or state.has_missed:
            state.repairs_until = self._end_of_repairs(state.round)
        state.missing, state.has_missed = missing, False
        # Before the step, because the parts in the updates are from before it.
        self._repair(state)
        mean = self._mean(state, is_complete)
        state.velocity = torch.add(mean, state.velocity, alpha=self.outer_momentum)
        change = torch.add(mean, state.velocity, alpha=self.outer_momentum).mul_(self.outer_lr)
        if state.layout is not None:
            # Statistics have no momentum: extrapolated, a variance could become negative.
            change = state.layout.with_statistics(change, mean)
        state.params = state.params + change

    def _mean(self, state: DiLoCoState, is_complete: bool) -> Tensor:
        """Mean of the updates, averaged with the worker's own update if one is unexpectedly
        missing.

        If workers average over different sets, differences between their models may grow. For
        example, if workers in a line hear only their neighbors, the averaging matrix has
        negative eigenvalues. Mixing in half of the identity raises these eigenvalues to at
        least 0.
        """
        mean = torch.zeros_like(state.params)
        ranks = sorted(state.updates)
        # One at a time: only a robust rule needs all of them at once.
        told = ((j, self.compressor.decompress(state.updates[j], mean.numel())) for j in ranks)
        if self.robust is not None:
            weights = dict.fromkeys(ranks, 1 / max(1, len(ranks)))
            mean = self.combine(state, mean, dict(told), weights)
        else:
            for _, each in told:
                mean.add_(each, alpha=1 / len(ranks))
        own = state.updates.get(state.rank)
        if is_complete or own is None:
            return mean
        return (mean + self.compressor.decompress(own, mean.numel())) / 2

    def _repair(self, state: DiLoCoState) -> None:
        """Average a part of the model and of the velocity with the other workers'."""
        sent = {rank: each for rank, each in state.updates.items() if "part" in each}
        if not sent:
            return
        said = (int(update["until"]) for update in sent.values())
        state.repairs_until = max(state.repairs_until, *said)
        part = self._part(state.round, state.params.numel())
        # A worker that hears of the repair only now has not sent its part yet.
        parts = {state.rank: self._own_part(state)} | {
            rank: update["part"] for rank, update in sent.items()
        }
        # Rank order: float sums come out bit-identical everywhere.
        stacked = torch.stack([parts[rank] for rank in sorted(parts)])
        mean = stacked.mean(0) if self.robust is None else stacked.median(0).values
        state.params, state.velocity = state.params.clone(), state.velocity.clone()
        state.params[part], state.velocity[part] = mean

    def _own_part(self, state: DiLoCoState) -> Tensor:
        """This round's part of the model and of the velocity, [2, length]."""
        part = self._part(state.round, state.params.numel())
        return torch.stack([state.params[part], state.velocity[part]])

    def _part(self, round: int, numel: int) -> slice:
        """The indices of a round's part: all of them in the last round, so that a repair that
        began late is complete.
        """
        if self._is_last(round):
            return slice(0, numel)
        place = round % self.repair_rounds
        return slice(
            place * numel // self.repair_rounds, (place + 1) * numel // self.repair_rounds
        )

    def _is_last(self, round: int) -> bool:
        return round == self.num_rounds - 1

    def _end_of_repairs(self, round: int) -> int:
        """End of a repair that begins in `round`; all workers hear of it a round later."""
        return round + self.repair_rounds + 2
