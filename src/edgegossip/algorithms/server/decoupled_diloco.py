"""Decoupled DiLoCo: workers never stand still, and the server merges what comes in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from edgegossip.algorithms.fragments import fragment
from edgegossip.algorithms.server.outer_server import (
    OuterServer,
    OuterServerState,
    PacedCommitterState,
    largest_credible,
    progress_of,
    with_statistics,
)
from edgegossip.algorithms.server.parameter_server import CommitState, ServerState
from edgegossip.algorithms.server.worker import MAX_COUNT, CommitterState
from edgegossip.contract.protocol import Effect, Message, Rank, Seconds, Send, SetTimer, Trained
from edgegossip.contract.ranges import check_counts, check_ranges
from edgegossip.contract.schema import Limits, MessageSpec, TensorSpec


@dataclass(slots=True, kw_only=True)
class LearnerState(PacedCommitterState):
    """State of a worker.

    Attributes:
        num_samples: Number of samples since the last commit.
        unsent_samples: Number of samples before that and since each fragment's last turn.
        unsent_steps: The same of steps.
    """

    num_samples: int = 0
    unsent_samples: dict[int, int] = field(default_factory=dict)
    unsent_steps: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SyncerState(OuterServerState):
    """State of the server.

    Attributes:
        velocity: :math:`m`, [num_params].
        closes_at: End of the grace window of each fragment that has a quorum.
        merged_at: Version of the model at the last merge of each fragment.
        life: Number of restarts of the server that its model has seen.
    """

    velocity: Tensor
    closes_at: dict[int, Seconds] = field(default_factory=dict)
    merged_at: dict[int, int] = field(default_factory=dict)
    life: int = 0


@dataclass(frozen=True, kw_only=True)
class DecoupledDiLoCo(OuterServer):
    r"""Merge the commits of a quorum and of those who come soon after, while all train on.

    The server waits until :math:`K` workers have committed, and then for the others during a
    *grace window* of at most :math:`\gamma` times the duration of the fastest worker's block.
    From the changes :math:`U_i` of those that have come, each made from :math:`s_i` samples in
    :math:`h_i` steps,

    .. math::
        w_i = s_i \cdot s_i / h_i, \qquad
        \Delta = \frac{\sum_i w_i U_i}{\sum_i w_i}, \qquad
        m \leftarrow \mu m + \Delta, \qquad
        W \leftarrow W + \alpha (\Delta + \mu m)

    A weight counts at most 8 times the next largest, because nobody can check :math:`s_i`.

    A worker trains on while its commit is in flight. If :math:`y` are its parameters at the
    commit and :math:`z` those at the answer, it continues from :math:`W + (z - y)`, so no step
    is lost. A commit that misses a merge takes part in the next one. The server waits for no
    lost worker: where fewer than :math:`K` are there, it waits for all of them.

    With `fragments`, the model is cut into :math:`P` equal ranges of its entries, which take
    turns: a worker's :math:`n`-th commit has its change of fragment :math:`(n - 1) \bmod P`
    since that fragment's last turn, and :math:`s_i` and :math:`h_i` count from there. Each
    fragment has a quorum and a grace window of its own; if all workers that are there wait,
    all commits are merged. An answer has the fragments that were merged since the worker's
    last one, or the whole model after a restart, a return or a lost answer. What a worker has
    learned in other fragments stays, and waits for their turns; what is still waiting at the
    end of the run is lost. `Standby` and `Shards` need a single fragment.

    Restarts are as in `AsyncLocalSGD`: no commit is lost, but the momentum is. With
    `waits_for_answer`, a quorum of all workers and equal speeds, this is `DiLoCo` without
    compression on a complete graph; without momentum, `FixedADACOMM`.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker.
        resend_after: See `ParameterServer`.
        local_steps: :math:`H`; see `OuterServer`.
        outer_lr: :math:`\alpha`, above 0.
        speeds: Sets each worker's number of steps; see `OuterServer`.
        quorum: :math:`K`, in [1, M]; None is half of the workers, rounded up.
        grace: :math:`\gamma`, at least 0; with 0, a quorum is merged at once.
        outer_momentum: :math:`\mu`, in [0, 1).
        waits_for_answer: Whether a worker pauses while its commit is in flight.
        fragments: :math:`P`, at least 1 and at most the entries of the model.

    Raises:
        ValueError: If a number is out of range, or the model has fewer entries than fragments.

    References:
        Douillard et al., "Decoupled DiLoCo for resilient distributed pre-training", 2026,
        arXiv:2604.21428; the abstract and a summary of the formulas were at hand. Departures:
        fragments are equal ranges of the flat model, not groups of layers, and each worker's
        own commits count the turns; changes count from the model that a worker started from,
        not from the server's newest; a worker merges its answer where the paper overwrites,
        and gets the model when its own commit is merged; blocks differ by speed, where the
        paper's workers commit at the same time whatever they have; the grace window is a
        share of a block.
    """

    quorum: int | None = None
    grace: float = 0.5
    outer_momentum: float = 0.7
    waits_for_answer: bool = False
    fragments: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "quorum", "fragments")
        check_ranges(self, fragments="at least 1")
        check_ranges(self, grace="at least 0", outer_momentum="in [0, 1)")
        check_ranges(self, quorum="at least 1 or None")
        if self.num_needed > self.num_workers:
            raise ValueError(
                f"quorum must be in [1, num_workers] or None, got {self.quorum} of "
                f"{self.num_workers}; it is the number of commits to wait for"
            )

    @property
    def num_needed(self) -> int:
        """Number of commits to wait for, :math:`K`."""
        return -(-self.num_workers // 2) if self.quorum is None else self.quorum

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """The messages of `OuterServer`; commits also state their samples."""
        specs = super().schema(params)
        numbers = {**specs["commit"].numbers, "num_samples": range(MAX_COUNT + 1)}
        commit, answer = replace(specs["commit"], numbers=numbers), specs["params"]
        if self.fragments > 1:
            lengths = [each.stop - each.start for each in self._fragments(params.numel())]
            update = TensorSpec(params.dtype, (None,), max_numel=max(lengths))
            turn = {"turn_steps": range(MAX_COUNT + 1), **self._life}
            commit = replace(commit, tensors={"update": update}, numbers={**numbers, **turn})
            parts = {str(k): TensorSpec(params.dtype, (n,)) for k, n in enumerate(lengths)}
            model = answer.specs["params"]
            counts = {name: each for name, each in answer.tensors.items() if name != "params"}
            answer = replace(answer, tensors=counts, optional={"params": model, **parts})
        return {**specs, "commit": commit, "params": answer}

    def init(self, rank: Rank, params: Tensor) -> CommitState:
        if self.fragments > params.numel():
            raise ValueError(
                f"fragments must be in [1, {params.numel()}] for a model of {params.numel()} "
                f"entries, got {self.fragments}; each fragment has an entry"
            )
        return super().init(rank, params)

    @property
    def answers_whole(self) -> bool:
        return self.fragments == 1

    def _fragments(self, numel: int) -> list[slice]:
        return [fragment(place, self.fragments, numel) for place in range(self.fragments)]

    def _turn(self, commit: Message) -> int:
        """Number of the fragment that a commit is about."""
        return (int(commit.numbers["number"]) - 1) % self.fragments

    @property
    def _life(self) -> Mapping[str, Limits]:
        return {"life": range(MAX_COUNT + 1)} if self.fragments > 1 else {}

    # The worker.

    def init_worker(self, rank: Rank, params: Tensor) -> CommitterState:
        return LearnerState(
            rank=rank,
            params=params,
            answer=self.no_answer(params),
            local_steps=self.local_steps,
        )

    def trains_on(self, state: CommitterState) -> bool:
        return not self.waits_for_answer

    def learn(self, state: CommitterState, event: Trained) -> None:
        super().learn(state, event)
        assert isinstance(state, LearnerState)
        state.num_samples += event.num_samples

    def commit_numbers(self, state: CommitterState) -> Mapping[str, float]:
        assert isinstance(state, LearnerState)
        return {**super().commit_numbers(state), "num_samples": state.num_samples}

    def committed(self, state: CommitterState, now: Seconds) -> list[Effect]:
        assert isinstance(state, LearnerState)
        state.num_samples = 0
        return super().committed(state, now)

    def go_back(self, state: CommitterState, event: Trained, now: Seconds) -> list[Effect]:
        assert isinstance(state, LearnerState)
        state.num_samples = 0  # there is no progress to commit
        state.unsent_samples, state.unsent_steps = {}, {}
        return super().go_back(state, event, now)

    def divide(self, state: CommitterState, commit: Message) -> tuple[Message, Tensor]:
        if self.fragments == 1:
            return super().divide(state, commit)
        assert isinstance(state, LearnerState)
        turn, numbers = self._turn(commit), {**commit.numbers}
        part = self._fragments(state.params.numel())[turn]
        for own, name in (
            (state.unsent_samples, "num_samples"),
            (state.unsent_steps, "num_steps"),
        ):
            for k in range(self.fragments):
                own[k] = own.get(k, 0) + int(numbers[name])
        # The other fragments keep their progress, which counts in their own turns.
        numbers["num_samples"] = state.unsent_samples.pop(turn)
        numbers["turn_steps"] = state.unsent_steps.pop(turn)
        # Trained entries come first, so those of a fragment do, too.
        length, num_trained = part.stop - part.start, int(numbers["num_trained"])
        numbers["num_trained"] = min(max(num_trained - part.start, 0), length)
        numbers["life"] = int(state.answer.numbers.get("life", 0))
        committed = state.base.clone()
        committed[part] = state.params[part]
        return replace(
            commit, payload={"update": commit.payload["update"][part]}, numbers=numbers
        ), committed

    def rebased(self, state: CommitterState, base: Tensor) -> Tensor:
        if self.fragments == 1 or state.commit is None or state.committed is None:
            return super().rebased(state, base)
        # Also without steps since the commit: there is progress outside of its fragment.
        moved, measured = base + (state.params - state.committed), state.params
        if not state.num_steps:
            part = self._fragments(base.numel())[self._turn(state.commit)]
            measured = measured.clone()
            measured[part] = base[part]
        return self._layout(state).with_statistics(moved, measured)

    def _take_answer(
        self, state: CommitterState, answer: Message, now: Seconds
    ) -> list[Effect]:
        if "params" not in answer.payload:
            # Fragments complete the model that the open commit was made from. A worker that
            # pulls has lost that model, and waits for a whole one.
            if state.is_pulling:
                return []
            whole, parts = state.base.clone(), self._fragments(state.params.numel())
            for k, part in enumerate(parts):
                if (values := answer.payload.get(str(k))) is not None:
                    whole[part] = values
            payload = {"params": whole, "counts": answer.payload["counts"]}
            answer = replace(answer, payload=payload)
        return super()._take_answer(state, answer, now)

    # The server.

    def make_server(self, **fields: Any) -> SyncerState:  # noqa: ANN401
        return SyncerState(**fields, velocity=torch.zeros_like(fields["params"]))

    def settings(self, state: ServerState, rank: Rank) -> Mapping[str, float]:
        assert isinstance(state, SyncerState)
        life = {"life": state.life} if self.fragments > 1 else {}
        return {**super().settings(state, rank), **life}

    @property
    def limits(self) -> Mapping[str, Limits]:
        return {**super().limits, **self._life}

    def recall(self, state: ServerState, numbers: Mapping[str, float]) -> None:
        assert isinstance(state, SyncerState)
        super().recall(state, numbers)
        # Versions of a former life may name other models, so fragments cannot complete them.
        state.life = min(int(numbers.get("life", 0)) + 1, MAX_COUNT)

    def _take_commit(self, state: ServerState, sender: Rank, message: Message) -> None:
        if self.fragments > 1:
            # The schema allows the lengths of all fragments; only a liar sends another one's.
            part = self._fragments(state.params.numel())[self._turn(message)]
            if message.payload["update"].numel() != part.stop - part.start:
                return
        super()._take_commit(state, sender, message)

    def serve(self, state: ServerState, now: Seconds) -> list[Effect]:
        assert isinstance(state, SyncerState)
        groups = self._groups(state, sorted(state.waiting))
        waits = any(j not in state.waiting for j in self.training(state))
        effects: list[Effect] = []
        due: list[Rank] = []
        for turn, ranks in groups.items():
            if waits and not self._is_due(state, turn, ranks, now, effects):
                continue
            state.closes_at.pop(turn, None)
            due += ranks
        return [*effects, *(self.take(state, sorted(due)) if due else [])]

    def _groups(self, state: SyncerState, ranks: list[Rank]) -> dict[int, list[Rank]]:
        """Group `ranks` by the fragments of their waiting commits."""
        turns = {rank: self._turn(state.waiting[rank]) for rank in ranks}
        return {k: [j for j in ranks if turns[j] == k] for k in sorted({*turns.values()})}

    def _is_due(
        self,
        state: SyncerState,
        turn: int,
        ranks: list[Rank],
        now: Seconds,
        effects: list[Effect],
    ) -> bool:
        """Whether a fragment has a quorum and its window is over; begin the window if not."""
        if len(ranks) < self.num_needed:
            return False
        if turn not in state.closes_at:
            at = state.closes_at[turn] = now + self._window(state, ranks)
            if at > now:
                # Windows overlap, so each fragment has its own timer.
                name = f"window {turn}" if self.fragments > 1 else "window"
                effects.append(SetTimer(name, at))
        return now >= state.closes_at[turn]

    def answer(self, state: ServerState, rank: Rank) -> Send:
        assert isinstance(state, SyncerState)
        commit, pulls = state.waiting.get(rank), rank in state.pulling
        send = super().answer(state, rank)
        # A worker without an open commit asks for a model, or its answer was lost. The version
        # of another life says nothing about what its model lacks.
        if self.fragments == 1 or pulls or commit is None:
            return send
        if commit.numbers["life"] != state.life:
            return send
        version, parts = commit.numbers["version"], self._fragments(state.params.numel())
        payload = {
            str(k): state.params[part]
            for k, part in enumerate(parts)
            if state.merged_at.get(k, 0) > version
        }
        payload["counts"] = send.message.payload["counts"]
        return replace(send, message=replace(send.message, payload=payload))

    def _window(self, state: SyncerState, ranks: list[Rank]) -> Seconds:
        """Length of the grace window, in seconds."""
        speeds = [state.waiting[rank].numbers["pace"] for rank in ranks]
        # All blocks last as long as that of the fastest worker. Until its speed is known,
        # nothing says how long that is. A liar can end the window early, after which commits
        # count one merge later; a limit to its speed would be worse, as one that claims to be
        # slow could then stretch the window.
        fastest = max([*speeds, *self.known_speeds(state).values()], default=0.0)
        return self.grace * self.local_steps / fastest if fastest else 0.0

    def absorb(self, state: SyncerState, commits: list[Message]) -> None:
        parts, params, velocity = (
            self._fragments(state.params.numel()),
            state.params,
            state.velocity,
        )
        # New tensors: answers that are in flight have the old ones.
        state.params, state.velocity = params.clone(), velocity.clone()
        for turn in sorted({self._turn(commit) for commit in commits}):
            part, own = parts[turn], [each for each in commits if self._turn(each) == turn]
            merged, moved = self._merged(params[part], velocity[part], own)
            state.params[part], state.velocity[part] = merged, moved
            state.merged_at[turn] = state.version

    def _merged(
        self, params: Tensor, velocity: Tensor, commits: list[Message]
    ) -> tuple[Tensor, Tensor]:
        """Take an outer step on a fragment; return it and its velocity."""
        weights = [_weight(commit) for commit in commits]
        # Commits without samples, as of skipped training, count alike among themselves.
        weights = weights if any(weights) else [1.0] * len(commits)
        largest = largest_credible(weights)  # nobody can check the samples of others
        weights = [min(weight, largest) for weight in weights]
        mean = measured = nothing = torch.zeros_like(params)
        for commit, weight in zip(commits, weights, strict=True):
            share = weight / sum(weights)
            mean = mean.add(progress_of(commit), alpha=share)
            # Running statistics have no momentum: they move to the mean of those measured.
            measured = measured + with_statistics(commit, nothing, params, share)
        mu = self.outer_momentum
        velocity = mean.add(velocity, alpha=mu)
        step = mean.add(velocity, alpha=mu)
        return params.add(step, alpha=self.outer_lr).add(measured), velocity


def _weight(commit: Message) -> float:
    numbers = commit.numbers
    num_samples = numbers["num_samples"]
    num_steps = numbers.get("turn_steps", numbers["num_steps"])
    return num_samples * num_samples / num_steps if num_steps else 0.0
