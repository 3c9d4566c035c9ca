"""HALoS: a local server in each region and a global one above them; no region waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from edgegossip.algorithms.server.halos_levels import (
    GlobalLevel,
    LocalLevel,
    LocalServerState,
    RegionState,
)
from edgegossip.algorithms.server.parameter_server import CommitState
from edgegossip.algorithms.server.worker import SERVER
from edgegossip.contract.algorithm import Algorithm, Traits
from edgegossip.contract.protocol import (
    Effect,
    Event,
    Finish,
    Message,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from edgegossip.contract.ranges import check_counts, check_ranges
from edgegossip.contract.schema import MessageSpec
from edgegossip.contract.topology import from_edges

_ABOVE = "global-"
"""Begins kinds of messages and names of timers between local servers and the global one."""


@dataclass(slots=True, kw_only=True)
class HALoSState(WorkerState):
    """State of a rank.

    Attributes:
        local: State in its region; None at the global server.
        above: State at the global level; None at a worker.
    """

    local: CommitState | None = None
    above: CommitState | None = None

    @property
    def estimate(self) -> Tensor:
        level = self.local if self.above is None else self.above
        assert level is not None
        return level.estimate


@dataclass(frozen=True, kw_only=True)
class HALoS(Algorithm[HALoSState]):
    r"""Commit to a server of the own region, which commits to a global server.

    Rank 0 is the global server, ranks 1 to :math:`R` are the regions' local servers, and the
    others are workers. In its region, a worker commits to the local server as in
    `AsyncLocalSGD`, with delayed Nesterov momentum and shorter blocks on slow workers, so its
    models travel on fast links. After :math:`K` commits, a local server sends the sum
    :math:`S` of the changes that they made to its model :math:`\theta` to the global one, for
    which it does not wait. The global server treats :math:`S` as `AsyncLocalSGD` treats a
    commit and answers with its model :math:`W`. The local server then mixes

    .. math:: \theta \leftarrow (1 - a)\, \theta + a W

    and goes on; the momentum at neither level is sent. :math:`W` is evaluated. When its workers
    have finished, a local server sends what is left and waits for the answer.

    Faults at each level are those of `ParameterServer`. A global server that has restarted
    continues with the newest model that a local server got from it, and a restarted local
    server with the newest of its workers' models; changes that it had not sent yet stay in that
    model, but are lost to the global one.

    Args:
        regions: Region of each worker, in order of ranks, from 0 to :math:`R - 1`.
        num_rounds: Commits of each worker.
        local_steps: :math:`H`, SGD steps of the region's fastest worker between two commits.
        speeds: Sets each worker's number of steps; see `OuterServer`.
        local_lr: A commit moves :math:`\theta` by `local_lr` / M of its change at once, where M
            is the number of workers in the region; above 0.
        local_momentum: Of the local servers, in [0, 1).
        local_buffer: Commits between two changes of this momentum, at least 1.
        commits_per_sum: :math:`K`, at least 1.
        global_share: :math:`a`, in [0, 1].
        global_lr: A sum moves :math:`W` by `global_lr` / R of itself at once; above 0.
        global_momentum: Of the global server, in [0, 1).
        global_buffer: Sums between two changes of this momentum, at least 1.
        resend_after: Seconds until an unanswered commit is resent, at both levels; see
            `ParameterServer`.
        patience: Seconds for which a lost server is waited for.

    Raises:
        ValueError: If a number is out of range, or a region between others has no worker.

    References:
        Kim et al., "HALoS: Hierarchical asynchronous local SGD over slow networks for
        geo-distributed large language model training", ICML 2025, arXiv:2506.04531; rule and
        settings from the authors' code (utnslab/halos), where rates are 0.2 per commit and
        0.15 per sum, as here with four workers in each of four regions. Departures: speeds are
        measured or forecast all the time, and compared within a region; commits that arrive
        between a sum and its answer count towards the next sum, which has their changes, where
        the code counts anew from the answer on and never sends them, so sums are sent more
        often and no change is lost; running statistics have no momentum.
    """

    regions: tuple[int, ...]
    num_rounds: int
    local_steps: int = 8
    speeds: str = "measured"
    local_lr: float = 0.8
    local_momentum: float = 0.9
    local_buffer: int = 16
    commits_per_sum: int = 32
    global_share: float = 0.25
    global_lr: float = 0.6
    global_momentum: float = 0.5
    global_buffer: int = 2
    resend_after: Seconds | None = None
    patience: Seconds = 600.0

    def __post_init__(self) -> None:
        if {*self.regions} != {*range(self.num_regions)} or not self.regions:
            raise ValueError(
                f"regions must be each worker's region, and name all from 0 on, got "
                f"{self.regions}; with two regions of two workers, take (0, 0, 1, 1)"
            )
        check_counts(self, "num_rounds", "commits_per_sum", "local_buffer", "global_buffer")
        check_ranges(self, commits_per_sum="at least 1", global_share="in [0, 1]")
        check_ranges(self, local_lr="above 0 and finite", global_lr="above 0 and finite")
        check_ranges(self, local_momentum="in [0, 1)", global_momentum="in [0, 1)")
        check_ranges(self, local_buffer="at least 1", global_buffer="at least 1")
        self.level(0)  # it checks the rest

    # Who is where.

    @property
    def num_regions(self) -> int:
        """Number of regions, :math:`R`."""
        return 1 + max(self.regions, default=-1)

    def region(self, rank: Rank) -> int:
        """The region of a local server or of a worker."""
        return (
            rank - 1 if rank <= self.num_regions else self.regions[rank - 1 - self.num_regions]
        )

    def members(self, region: int) -> tuple[Rank, ...]:
        """The ranks of a region: its server, and its workers in order."""
        first = 1 + self.num_regions
        own = (first + k for k, each in enumerate(self.regions) if each == region)
        return (1 + region, *own)

    def level(self, region: int) -> LocalLevel:
        """The algorithm of a region, whose ranks are the places in `members`."""
        return self._local(self.regions.count(region))

    def _local(self, num_workers: int) -> LocalLevel:
        return LocalLevel(
            num_workers=num_workers,
            num_rounds=self.num_rounds,
            resend_after=self.resend_after,
            patience=self.patience,
            local_steps=self.local_steps,
            outer_lr=self.local_lr,
            speeds=self.speeds,
            outer_momentum=self.local_momentum,
            buffer_size=self.local_buffer,
        )

    @cached_property
    def top(self) -> GlobalLevel:
        """The algorithm of the servers, whose ranks are the run's."""
        return GlobalLevel(
            num_workers=self.num_regions,
            # No region makes as many commits: it ends after a commit that is its last.
            num_rounds=2 * (self.num_rounds * len(self.regions) + 1),
            resend_after=self.resend_after,
            patience=self.patience,
            local_steps=self.commits_per_sum,
            outer_lr=self.global_lr,
            speeds="equal",
            outer_momentum=self.global_momentum,
            buffer_size=self.global_buffer,
        )

    @property
    def traits(self) -> Traits:
        servers = range(1, 1 + self.num_regions)
        above = [(SERVER, server) for server in servers]
        below = [(server, j) for server in servers for j in self.members(server - 1)[1:]]
        topology = from_edges(1 + self.num_regions + len(self.regions), [*above, *below])
        return Traits(topology=topology, num_rounds=self.num_rounds, takes_repeats=True)

    def role(self, rank: Rank) -> Role:
        if rank > self.num_regions:
            return Role("worker", is_evaluated=False)
        return Role("server", has_data=False, is_evaluated=rank == SERVER)

    def schema(self, params: Tensor) -> dict[str, MessageSpec]:
        """The messages of `OuterServer` in a region, and those between servers."""
        largest = max(self.regions.count(each) for each in self.regions)
        specs = self._local(largest).schema(params)
        for kind, spec in self.top.schema(params).items():
            numbers = {**spec.numbers, "sums": range(self.top.num_rounds + 1)}
            specs[_ABOVE + kind] = replace(spec, numbers=numbers, max_round=self.num_rounds)
        return specs

    def init(self, rank: Rank, params: Tensor) -> HALoSState:
        local: CommitState | None = None
        if rank != SERVER:
            region = self.region(rank)
            local = self.level(region).init(self.members(region).index(rank), params)
        above = self.top.init(rank, params) if rank <= self.num_regions else None
        return HALoSState(rank=rank, params=params, local=local, above=above)

    # Events and effects.

    def handle(self, state: HALoSState, event: Event, now: Seconds) -> list[Effect]:
        effects: list[Effect] = []
        if (inner := self._in_region(state, event)) is not None:
            effects += self._handle_in_region(state, inner, now)
        if (inner := self._among_servers(state, event)) is not None:
            effects += self._handle_among_servers(state, inner, now)
        if isinstance(state.local, LocalServerState):
            effects += self._pass_on(state, state.local, now)
        level = state.above if state.local is None else state.local
        assert level is not None
        state.params = level.params
        if state.local is not None:
            state.round = state.local.round
        return effects

    def _in_region(self, state: HALoSState, event: Event) -> Event | None:
        """The event as the region's algorithm knows it; None if it is not about the region."""
        if state.local is None:
            return None
        members = self.members(self.region(state.rank))
        match event:
            case Received(sender, message):
                if sender not in members or message.kind.startswith(_ABOVE):
                    return None
                return Received(members.index(sender), _resized(message, len(members) - 1))
            case WorkerLost() | WorkerJoined():
                if event.rank not in members:
                    return None
                return replace(event, rank=members.index(event.rank))
            case TimerFired(name) if name.startswith(_ABOVE):
                return None
        return event

    def _among_servers(self, state: HALoSState, event: Event) -> Event | None:
        """The event as the servers' algorithm knows it; None if it is not about servers."""
        if state.above is None:
            return None
        match event:
            case Received(sender, message):
                if sender > self.num_regions or not message.kind.startswith(_ABOVE):
                    return None
                if state.rank == SERVER:
                    state.round = max(state.round, message.round)
                return Received(sender, _from_above(message))
            case WorkerLost() | WorkerJoined():
                return event if event.rank <= self.num_regions else None
            case TimerFired(name):
                own = name.removeprefix(_ABOVE)
                return TimerFired(own) if name.startswith(_ABOVE) else None
            case Started():
                return event
        return None

    def _handle_in_region(self, state: HALoSState, event: Event, now: Seconds) -> list[Effect]:
        assert state.local is not None
        region = self.region(state.rank)
        members, largest = self.members(region), max(map(self.regions.count, self.regions))
        effects: list[Effect] = []
        for effect in self.level(region).handle(state.local, event, now):
            match effect:
                case Send(receiver, message):
                    sent = _resized(message, largest)
                    effects.append(Send(members[receiver], sent))
                case Finish() if isinstance(state.above, RegionState):
                    state.above.is_closing = True  # it finishes after its last commit
                case _:
                    effects.append(effect)
        return effects

    def _handle_among_servers(
        self, state: HALoSState, event: Event, now: Seconds
    ) -> list[Effect]:
        above, local = state.above, state.local
        assert above is not None
        known = above.answer if isinstance(above, RegionState) else None
        effects = self._to_above(state, self.top.handle(above, event, now))
        if (
            isinstance(above, RegionState)
            and isinstance(local, LocalServerState)
            and above.answer is not known
        ):
            # A server that has restarted without any commit knows nothing of its own.
            share = self.global_share if local.version else 1.0
            local.params = local.model = local.model.lerp(above.base, share)
        return effects

    def _pass_on(
        self, state: HALoSState, local: LocalServerState, now: Seconds
    ) -> list[Effect]:
        """Let the local server's changes be those of its next commit."""
        above = state.above
        assert isinstance(above, RegionState)
        # Not while it asks for the model, which would replace the changes.
        if local.num_new and not above.is_pulling:
            # Statistics are reported as measured, and not as sums of changes.
            changed = above.params + local.progress
            above.params = self.top._layout(above).with_statistics(changed, local.model)
            above.num_asked += local.num_new
            above.num_steps += local.num_new
            local.progress, local.num_new = torch.zeros_like(local.progress), 0
        return self._to_above(state, self.top.go_on(above, now))

    def _to_above(self, state: HALoSState, effects: Iterable[Effect]) -> list[Effect]:
        """Name messages and timers between servers so that they are known as such."""
        found: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(receiver, message):
                    # Rounds are those of workers, so the servers' own are a number of its own.
                    round = state.round if state.local is None else state.local.round
                    numbers = {**message.numbers, "sums": message.round}
                    kind = _ABOVE + message.kind
                    found.append(Send(receiver, Message(kind, round, message.payload, numbers)))
                case SetTimer(name, at):
                    found.append(SetTimer(_ABOVE + name, at))
                case _:
                    found.append(effect)
        return found


def _from_above(message: Message) -> Message:
    """The message as the servers' algorithm made it."""
    numbers = dict(message.numbers)
    round = int(numbers.pop("sums"))
    return Message(message.kind.removeprefix(_ABOVE), round, message.payload, numbers)


def _resized(message: Message, num_workers: int) -> Message:
    """The message with counts of so many workers: all regions have messages of one form."""
    if "counts" not in message.payload:
        return message
    counts = message.payload["counts"]
    counts = F.pad(counts, (0, num_workers - len(counts)))  # a negative number cuts
    return replace(message, payload={**message.payload, "counts": counts})
