"""A server whose commits and answers have fragments of the model, which take turns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from edgegossip.algorithms.fragments import fragment
from edgegossip.algorithms.server.outer_server import (
    OuterServer,
    OuterServerState,
    PacedCommitterState,
)
from edgegossip.algorithms.server.parameter_server import CommitState, ServerState
from edgegossip.algorithms.server.worker import MAX_COUNT, CommitterState
from edgegossip.contract.protocol import Effect, Message, Rank, Seconds, Send, Trained
from edgegossip.contract.ranges import check_counts, check_ranges
from edgegossip.contract.schema import Limits, MessageSpec, TensorSpec


@dataclass(slots=True, kw_only=True)
class FragmentCommitterState(PacedCommitterState):
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
class FragmentServerState(OuterServerState):
    """State of the server.

    Attributes:
        merged_at: Version of the model at the last merge of each fragment.
        life: Number of restarts of the server that its model has seen.
    """

    merged_at: dict[int, int] = field(default_factory=dict)
    life: int = 0


@dataclass(frozen=True, kw_only=True)
class FragmentServer(OuterServer):
    r"""Base of servers that know the samples of each commit, and may cut the model.

    With `fragments`, the model is cut into :math:`P` equal ranges of its entries, which take
    turns: a worker's :math:`n`-th commit has its change of fragment :math:`(n - 1) \bmod P`
    since that fragment's last turn, and its samples and steps count from there. An answer has
    the fragments that were merged since the worker's last one, or the whole model after a
    restart, a return or a lost answer. What a worker has learned in other fragments stays, and
    waits for their turns; what is still waiting at the end of the run is lost. `Standby` and
    `Shards` need a single fragment.

    Args:
        num_workers: :math:`M`; see `ParameterServer`.
        num_rounds: Commits of each worker.
        resend_after: See `ParameterServer`.
        local_steps: :math:`H`; see `OuterServer`.
        outer_lr: :math:`\alpha`, above 0.
        speeds: Sets each worker's number of steps; see `OuterServer`.
        fragments: :math:`P`, at least 1 and at most the entries of the model.

    Raises:
        ValueError: If a number is out of range, or the model has fewer entries than fragments.
    """

    fragments: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "fragments")
        check_ranges(self, fragments="at least 1")

    # For algorithms to define.

    @abstractmethod
    def absorb_fragment(self, state: Any, part: slice, commits: list[Message]) -> None:  # noqa: ANN401
        """Take commits of one fragment into the state, and into `part` of `params` in place."""

    # Common to all of them.

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

    @property
    def limits(self) -> Mapping[str, Limits]:
        return {**super().limits, **self._life}

    @property
    def _life(self) -> Mapping[str, Limits]:
        return {"life": range(MAX_COUNT + 1)} if self.fragments > 1 else {}

    def _fragments(self, numel: int) -> list[slice]:
        return [fragment(place, self.fragments, numel) for place in range(self.fragments)]

    def turn(self, commit: Message) -> int:
        """Return the number of the fragment that a commit is about."""
        return (int(commit.numbers["number"]) - 1) % self.fragments

    # The worker.

    def make_worker(self, **fields: Any) -> FragmentCommitterState:  # noqa: ANN401
        return FragmentCommitterState(**fields)

    def learn(self, state: CommitterState, event: Trained) -> None:
        super().learn(state, event)
        assert isinstance(state, FragmentCommitterState)
        state.num_samples += event.num_samples

    def commit_numbers(self, state: CommitterState) -> Mapping[str, float]:
        assert isinstance(state, FragmentCommitterState)
        return {**super().commit_numbers(state), "num_samples": state.num_samples}

    def committed(self, state: CommitterState, now: Seconds) -> list[Effect]:
        assert isinstance(state, FragmentCommitterState)
        state.num_samples = 0
        return super().committed(state, now)

    def go_back(self, state: CommitterState, event: Trained, now: Seconds) -> list[Effect]:
        assert isinstance(state, FragmentCommitterState)
        state.num_samples = 0  # there is no progress to commit
        state.unsent_samples, state.unsent_steps = {}, {}
        return super().go_back(state, event, now)

    def divide(self, state: CommitterState, commit: Message) -> tuple[Message, Tensor]:
        if self.fragments == 1:
            return super().divide(state, commit)
        assert isinstance(state, FragmentCommitterState)
        turn, numbers = self.turn(commit), {**commit.numbers}
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
            part = self._fragments(base.numel())[self.turn(state.commit)]
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

    def make_server(self, **fields: Any) -> FragmentServerState:  # noqa: ANN401
        return FragmentServerState(**fields)

    def settings(self, state: ServerState, rank: Rank) -> Mapping[str, float]:
        assert isinstance(state, FragmentServerState)
        life = {"life": state.life} if self.fragments > 1 else {}
        return {**super().settings(state, rank), **life}

    def recall(self, state: ServerState, numbers: Mapping[str, float]) -> None:
        assert isinstance(state, FragmentServerState)
        super().recall(state, numbers)
        # Versions of a former life may name other models, so fragments cannot complete them.
        state.life = min(int(numbers.get("life", 0)) + 1, MAX_COUNT)

    def _take_commit(self, state: ServerState, sender: Rank, message: Message) -> None:
        if self.fragments > 1:
            # The schema allows the lengths of all fragments; only a liar sends another one's.
            part = self._fragments(state.params.numel())[self.turn(message)]
            if message.payload["update"].numel() != part.stop - part.start:
                return
        super()._take_commit(state, sender, message)

    def absorb(self, state: FragmentServerState, commits: list[Message]) -> None:
        parts = self._fragments(state.params.numel())
        state.params = state.params.clone()  # answers that are in flight have the old ones
        for turn in sorted({self.turn(commit) for commit in commits}):
            own = [commit for commit in commits if self.turn(commit) == turn]
            self.absorb_fragment(state, parts[turn], own)
            state.merged_at[turn] = state.version

    def answer(self, state: ServerState, rank: Rank) -> Send:
        assert isinstance(state, FragmentServerState)
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
