"""EdgeGossip: any gossip algorithm, with each worker's amount of data fitted to its speed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from edgegossip.algorithms.wrappers.edge_gossip.balancer import LONGEST, Balancer, Shares
from edgegossip.algorithms.wrappers.edge_gossip.forecasts import (
    detach,
    forecast_schema,
    known_of,
    with_forecast,
)
from edgegossip.algorithms.wrappers.edge_gossip.plan import (
    Correction,
    EpochPlan,
    RoundPlan,
    differ,
)
from edgegossip.algorithms.wrappers.edge_gossip.state import BalancedState
from edgegossip.algorithms.wrappers.edge_gossip.takeover import (
    choose_takeovers,
    claimed_by,
    require_valid,
    taken_over_by,
)
from edgegossip.algorithms.wrappers.inner import num_workers_in, require_fixed_roles
from edgegossip.contract import (
    Assign,
    Assigned,
    Effect,
    Event,
    Finish,
    Message,
    MessageSpec,
    Predict,
    Predicted,
    Rank,
    Received,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    Steps,
    TimerFired,
    Train,
    Trained,
    Traits,
    WorkerJoined,
    WorkerLost,
    Wrapper,
    check_choices,
    check_ranges,
)

Spread: TypeAlias = Literal["exact", "gossip"]
OnFailure: TypeAlias = Literal["continue", "halt", "reassign"]


@dataclass(frozen=True, kw_only=True)
class EdgeGossip(Wrapper[BalancedState]):
    r"""Train each worker on a share of its data, sized so that all workers finish together.

    Alone, it only balances: shares are random samples unless the task has an `AccuracyAware`.
    `edge_gossip` adds that, and `as_published` makes the paper's whole system.

    Before each epoch, worker :math:`i` forecasts its throughput :math:`p_i`; a pass over all
    its data would take :math:`T_i = |X_i| / p_i`. It then trains on the share :math:`r_i =
    \min_j T_j / T_i` (Algorithm 1, `Balancer`), whose samples its trainer chooses (Algorithm 2,
    `AccuracyAware`). The inner algorithm asks for epochs or steps and does not notice their
    adjustment:

    - `Epochs` are cut down to :math:`r_i` and done in blocks, each after a new forecast. The
      change of the parameters is multiplied by :math:`(\bar r / r_i)^{\beta (1 - f)}`, where
      :math:`r_i` is the share that was done, :math:`\bar r` the mean share, and :math:`f` the
      share of samples chosen for their high loss (`Trained.metrics["focus"]`).
    - The :math:`H` steps of a round become those of `Shares.steps` for :math:`k H`, where
      :math:`k` is `max_keep_ratio`: as many as fit into the time that the slowest platform
      takes for a whole number of them. They are done in blocks, too, and their number follows
      the speed of the last block. If the inner algorithm does not wait for others or has
      no fixed :math:`H`, they become :math:`\max(1, [k s_i H])` with the speed :math:`s_i`
      relative to the highest; with ``spread="gossip"``, which knows only the fastest pass,
      :math:`\max(1, [k r_i H])`. Passes visit the share :math:`r_i` of the data. Within a
      pass, a forecast that was wrong by more than a tenth is made again.

    :doc:`EdgeGossip </docs/edgegossip>` describes how forecasts spread, what failed platforms
    do, and what each setting costs and gains.

    Args:
        inner: Any algorithm with a `topology`; the wrapper sets the keep ratios. A parameter
            server needs a barrier after many steps, as in `FixedADACOMM`.
        spread: How workers learn :math:`\min_j T_j`: "exact", from every worker's forecast, or
            "gossip", from a minimum in the inner algorithm's own messages.
        balancer: Algorithm 1, with its thresholds.
        on_failure: Policy if more platforms have failed than the balancer allows: "continue",
            "halt" the run with a `PlatformError`, or "reassign" each failed platform's data to
            a spare, or else to the fastest platform that can reach it.
        spares: Workers without data that stay idle until they get a failed platform's data.
        reachable: For each worker, the ranks whose data it can reach; None for all of them.
        max_keep_ratio: Share of its data that the fastest worker keeps each epoch, in (0, 1];
            the other workers' shares are reduced in proportion.
        block_share: Share of the remaining epoch that is done between two forecasts, in (0, 1].
            With 1, there is one forecast for each epoch or pass, as in the paper, and neither
            epochs nor rounds of steps are done in blocks.
        correction: :math:`\beta`, in [0, 1]; 0 averages as the paper does. It has no effect on
            `Steps`, nor if a pass would take all workers equally long.
        max_mean_factor: Limit on the mean of the factors over all workers, at least 1; a higher
            mean lowers :math:`\beta`.
        timeout: Seconds to wait for forecasts; None for 5 % of the duration of the worker's own
            epoch.
        max_age: Epochs after which "gossip" forgets the fastest worker; None for
            :math:`2 (1 + \lceil \log_2 E \rceil)` with :math:`E` workers.

    Raises:
        ValueError: If a number or rank is out of range, a name is unknown, settings contradict
            each other (`spares` or `reachable` without "reassign"; "gossip" without
            "continue"), or `inner` has no topology, a standby or several servers, or is
            balanced itself.

    References:
        Han et al., "EdgeGossip", IEEE TPDS 32(7), 2021, doi:10.1109/TPDS.2020.3046440.
        Departures: each worker computes its own ratio, without a central balancer; by default,
        the run goes on when more than 10 % of the platforms have failed; blocks, forecasts
        within a pass, "gossip", spares, the treatment of steps and the behavior of failed
        platforms are ours; the cost of the look at aggregated points is part of
        :math:`|X_i|`; the correction, which for :math:`\beta = 1` is that of Wang et al.,
        "FedNova", NeurIPS 2020, arXiv:2007.07481.
    """

    spread: Spread = "exact"
    balancer: Balancer = Balancer()
    on_failure: OnFailure = "continue"
    spares: tuple[Rank, ...] = ()
    reachable: Mapping[Rank, tuple[Rank, ...]] | None = None
    max_keep_ratio: float = 1.0
    block_share: float = 0.125
    correction: float = 0.5
    max_mean_factor: float = 1.3
    timeout: Seconds | None = None
    max_age: int | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            max_keep_ratio="in (0, 1]",
            block_share="in (0, 1]",
            correction="in [0, 1]",
            max_mean_factor="at least 1",
            timeout="above 0 or None",
            max_age="at least 1 or None",
        )
        check_choices(self, spread=get_args(Spread), on_failure=get_args(OnFailure))
        ways = (self.on_failure, self.spread)
        require_valid(self.num_workers, self.spares, self.reachable, *ways)
        require_fixed_roles(self)
        if self.inner.traits.is_balanced:
            raise ValueError(
                f"EdgeGossip fits work to speeds, and {type(self.inner).__name__} does "
                "so already; leave out one of them"
            )

    @property
    def traits(self) -> Traits:
        """Traits of the inner algorithm, with `is_balanced` and `moves_data` set."""
        moves_data = self.on_failure == "reassign"
        return replace(self.inner.traits, is_balanced=True, moves_data=moves_data)

    @property
    def num_workers(self) -> int:
        return num_workers_in(self)

    def init(self, rank: Rank, params: Tensor) -> BalancedState:
        return BalancedState(rank=rank, params=params, inner=self.inner.init(rank, params))

    def role(self, rank: Rank) -> Role:
        """Role in the inner algorithm; spares have no data and are not evaluated."""
        role = self.inner.role(rank)
        is_spare = rank in self.spares
        return replace(role, has_data=False, is_evaluated=False) if is_spare else role

    def schema(self, params: Tensor) -> Mapping[str, MessageSpec]:
        """The inner algorithm's messages, and those that carry forecasts."""
        inner = self.inner.schema(params)
        if self.spread == "gossip":
            return with_forecast(inner)
        return {**inner, **forecast_schema(self.traits.num_rounds, self.num_workers)}

    def handle(self, state: BalancedState, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Started():
                return self._start(state, event, now)
            case Predicted():
                state.expect(event.throughput)
                return self._use_forecast(state, now)
            case Trained():
                return self._account(state, event, now)
            case Received(message=Message(kind="forecast")):
                state.hear_forecast(event.sender, event.message)
                state.has_news = True
                return self._reconsider(state, now)
            case Received(message=Message(kind="spare-joined")):
                # To the inner algorithm, a spare is a lost worker until it joins.
                return self._pass_on(state, WorkerJoined(event.sender, has_restarted=True), now)
            case Received():
                # Heard by a failed platform, too, which sends the minimum on.
                state.has_news |= state.fastest.hear(event.message, self._max_age)
                return self._pass_on(state, detach(event), now)
            case TimerFired("forecast"):
                return self._begin(state, now)
            case TimerFired("rest"):
                state.is_predicting = True
                return [Predict()]
            case Assigned():
                return self._take_over(state, event, now)
            case WorkerLost():
                # The inner algorithm first: it may go on without the worker, and ask for
                # training. The lost worker's forecast may have been the last one missing.
                state.lost[event.rank] = None
                state.has_news = True  # rounds may have been as long as they were for its sake
                return [*self._pass_on(state, event, now), *self._reconsider(state, now)]
            case WorkerJoined():
                return self._welcome(state, event, now)
        return self._pass_on(state, event, now)

    # Between the inner algorithm and the driver.

    def _start(self, state: BalancedState, event: Started, now: Seconds) -> list[Effect]:
        state.epoch_cost, state.layout = event.epoch_cost, event.layout
        # Before the inner algorithm starts, so that it never waits for a spare.
        for spare in self.spares:
            if spare != state.rank:
                self._pass_on(state, WorkerLost(spare), now)
        if state.rank in self.spares:
            state.is_spare = True
            # A spare may never be needed, so it must not keep the run open. Its forecast tells
            # the others that it is there.
            return [Predict(), Finish(may_resume=True)]
        return self._pass_on(state, event, now)

    def _pass_on(self, state: BalancedState, event: Event, now: Seconds) -> list[Effect]:
        """Let the inner algorithm handle `event`, and hold back its training requests."""
        effects = self.inner.handle(state.inner, event, now)
        state.params, state.round = state.inner.params, state.inner.round
        if state.is_spare:
            return []  # the inner algorithm keeps its state up to date and must not send yet
        carried: list[Effect] = []
        for effect in effects:
            match effect:
                case Train():
                    # Held back until the share is known. Within a pass it is, and a forecast
                    # for each exchange would only cost time, unless the last one was wrong.
                    state.waiting = effect
                    state.is_predicting = self._needs_forecast(state)
                    if state.is_predicting:
                        carried.append(Predict())
                    else:
                        carried += self._train_steps(state, now)
                case Send() if self.spread == "gossip":
                    carried.append(state.fastest.piggyback(effect, state.seconds))
                case _:
                    carried.append(effect)
        return carried

    # Forecasts.

    def _needs_forecast(self, state: BalancedState) -> bool:
        """Whether the waiting training begins a pass, or a round after a wrong forecast."""
        if not state.is_within_pass:
            return True
        return self.block_share < 1 and state.begins_round and state.was_wrong()

    @property
    def _regulars(self) -> list[Rank]:
        # A rank without data, such as a server, needs no forecast.
        return [j for j in range(self.num_workers) if self.role(j).has_data]

    @property
    def _max_age(self) -> int:
        return self.max_age or 2 * (1 + math.ceil(math.log2(max(2, self.num_workers))))

    def _use_forecast(self, state: BalancedState, now: Seconds) -> list[Effect]:
        if isinstance(state.plan, EpochPlan):  # between two blocks, for this worker alone
            block = state.plan.next(state.throughput, now)
            return self._finish_plan(state, now) if block is None else [block]
        if state.is_within_pass and not state.has_failed(self.balancer.min_throughput):
            return [*self._correct(state), *self._train_steps(state, now)]
        if state.rests_on(self.balancer.min_throughput, now):
            return [SetTimer("rest", now + state.rest_seconds)]  # no news to announce
        if self.spread == "gossip":
            # There is one such forecast per epoch, so ages count epochs.
            state.fastest.grow_older(self._max_age)
            return self._begin(state, now)
        return [*self._announce(state, now), *self._reconsider(state, now)]

    def _correct(self, state: BalancedState) -> list[Effect]:
        """Replace a forecast that was wrong, within a pass; nobody waits for it."""
        state.has_news = True
        if self.spread == "gossip":
            return []  # the next messages carry it
        own, told = state.own_forecast, state.forecasts[state.rank]
        if not differ(own.throughput, told.throughput):
            return []
        state.forecasts[state.rank] = own
        return self._tell_all(state, own.message())

    def _announce(self, state: BalancedState, now: Seconds) -> list[Effect]:
        state.forecasts[state.rank] = own = state.own_forecast
        # Forecasts may be lost: after the timeout, training begins with those known.
        timeout = state.patience(self.timeout, self.balancer.min_throughput)
        timer = [] if state.is_spare else [SetTimer("forecast", now + timeout)]
        return [*self._tell_all(state, own.message()), *timer]

    def _tell_all(self, state: BalancedState, message: Message) -> list[Effect]:
        others = sorted({*self._regulars, *self.spares} - {state.rank, *state.lost})
        return [Send(j, message) for j in others]

    def _reconsider(self, state: BalancedState, now: Seconds) -> list[Effect]:
        """React to news about another platform."""
        if state.rank not in state.forecasts:
            return []  # this worker's own forecast comes first
        if state.is_spare:
            return self._handle_failures(state, self._shares(state))
        return self._begin(state, now) if state.has_heard_all(self._regulars) else []

    # Training.

    def _begin(self, state: BalancedState, now: Seconds) -> list[Effect]:
        """Compute this worker's share and train on it."""
        if state.waiting is None or state.is_busy:
            return []  # the next request, or the answer that is awaited, leads here again
        if self.spread == "gossip":
            own, has_failed = state.seconds, state.has_failed(self.balancer.min_throughput)
            fastest, correction = state.fastest.seconds, Correction()
            state.keep_ratio = 0.0 if has_failed else min(fastest, own) / own
        else:
            shares = self._shares(state)
            # Data that arrives now changes this worker's share, so training waits for it.
            if effects := self._handle_failures(state, shares):
                return effects
            fastest = shares.fastest_seconds
            state.keep_ratio = float(shares.keep_ratios[state.rank])
            exponent = shares.stable_correction(self.correction, self.max_mean_factor)
            correction = Correction(self.max_keep_ratio * shares.mean_keep_ratio, exponent)
        state.keep_ratio *= self.max_keep_ratio
        # All is known that this epoch's timer would wait for.
        cancel = [SetTimer("forecast", math.inf)] if self.spread == "exact" else []
        if not state.keep_ratio:
            state.pass_left = 0.0  # each round needs a forecast until it has recovered
            return [*cancel, *self._pause(state, fastest, now)]
        if isinstance(state.waiting.work, Steps):
            state.pass_left, state.has_news = state.keep_ratio * state.epoch_cost, True
            return [*cancel, *self._train_steps(state, now)]
        return [*cancel, self._train_epoch(state, correction, now)]

    def _step_ratio(self, state: BalancedState) -> float:
        if self.spread == "gossip":
            return self.max_keep_ratio * min(1.0, state.fastest.seconds / state.seconds)
        traits, shares = self.traits, self._shares(state)
        # Where nobody waits, rounds need not be equally long.
        num_steps = traits.local_steps if traits.is_synchronous else None
        return shares.step_ratio(state.rank, num_steps, self.max_keep_ratio)

    def _train_steps(self, state: BalancedState, now: Seconds) -> list[Effect]:
        train = state.take_waiting()
        assert isinstance(train.work, Steps)
        if state.has_news and not train.work.after:  # a round is not divided anew
            state.step_ratio, state.has_news = self._step_ratio(state), False
        asked = train.work.num_steps
        num_steps = train.work.scaled(state.step_ratio)
        if not num_steps:
            return self._pass_on(state, Trained.skipped(train.params), now)
        train = replace(train, work=Steps(num_steps), keep_ratio=state.keep_ratio)
        if not self.traits.is_synchronous or self.block_share == 1:
            return [train]
        # Others wait for this round, so it must end on time although the speed may change.
        plan = state.plan = RoundPlan.begin(
            train,
            num_steps,
            throughput=state.throughput,
            step_cost=state.step_cost,
            most=LONGEST * asked,
            now=now,
        )
        return [plan.block()]

    def _train_epoch(self, state: BalancedState, by: Correction, now: Seconds) -> Effect:
        state.plan = EpochPlan.begin(
            state.take_waiting(),
            keep_ratio=state.keep_ratio,
            epoch_cost=state.epoch_cost,
            throughput=state.throughput,
            block_share=self.block_share,
            now=now,
            correction=by,
            layout=state.layout,
        )
        return state.plan.first()

    def _pause(self, state: BalancedState, fastest: Seconds, now: Seconds) -> list[Effect]:
        """Act as a failed platform, which hardly trains and delays no other worker."""
        if state.is_due_to_try(now):
            return [replace(state.take_waiting(), work=Steps(1))]
        if self.traits.is_synchronous:
            # Others wait for this worker's model, so it takes part untrained.
            return self._pass_on(state, Trained.skipped(state.take_waiting().params), now)
        # No worker waits for it. It may rest for the remainder of the run, which may end.
        state.rest_seconds = fastest if fastest < math.inf else _REST
        rest = SetTimer("rest", now + state.rest_seconds)
        return [Finish(may_resume=True), rest]

    def _account(self, state: BalancedState, event: Trained, now: Seconds) -> list[Effect]:
        if event.has_gone_back:  # the plan belongs to other parameters
            state.plan = None
            return self._pass_on(state, event, now)
        cost = event.cost or event.num_samples
        # What was done counts, not what was asked: batches are whole.
        state.pass_left -= cost
        state.measure(cost, event.seconds)
        state.trained_at, state.step_cost = now, cost / max(1, event.num_steps)
        if state.plan is None:
            return self._pass_on(state, event, now)
        if isinstance(state.plan, RoundPlan):
            state.plan.account(event, now)
            return [state.plan.block()] if state.plan.left else self._finish_plan(state, now)
        state.plan.account(event)
        return self._finish_plan(state, now) if state.plan.is_done else [Predict()]

    def _finish_plan(self, state: BalancedState, now: Seconds) -> list[Effect]:
        return self._pass_on(state, state.take_plan().result(now), now)

    # Failures.

    def _known(self, state: BalancedState) -> tuple[list[float], list[float]]:
        slowest = self.balancer.min_throughput
        return known_of(state.forecasts, state.lost, self.num_workers, slowest)

    def _shares(self, state: BalancedState) -> Shares:
        return self.balancer.balance(*self._known(state))

    def _handle_failures(self, state: BalancedState, shares: Shares) -> list[Effect]:
        """Apply the failure policy; give back inherited data once few platforms have failed."""
        has_too_many = self.balancer.has_too_many_failures(shares)
        if self.on_failure == "halt":
            self.balancer.require_few_failures(shares)
        # One `Assign` at a time; a spare without a reachable model has nothing to train.
        if state.is_assigning or state.is_stranded(self._regulars):
            return []
        # Every worker computes all takeovers, from the same claims and forecasts, and carries
        # out its own. Claims that differ for a while only make two workers train on the data.
        takeovers = claimed_by(state.holdings, self.spares)
        if has_too_many and self.on_failure == "reassign":
            throughputs, _ = self._known(state)
            takeovers = choose_takeovers(
                takeovers, shares, throughputs, self.spares, self.reachable
            )
        elif not has_too_many:
            # Regular platforms give data back; a spare would then have none.
            takeovers = {f: j for f, j in takeovers.items() if j in self.spares}
        data = taken_over_by(state.rank, takeovers)
        own = () if state.rank in self.spares else (state.rank,)
        if data == state.inherited or not own + data:
            return []
        state.inherited, state.is_assigning = data, True
        return [Assign(own + data)]

    def _take_over(self, state: BalancedState, event: Assigned, now: Seconds) -> list[Effect]:
        state.is_assigning = False
        if state.is_stranded(self._regulars):
            state.inherited = ()  # all were lost while the data was prepared
            return []
        state.epoch_cost = event.epoch_cost
        if state.is_spare:
            state.is_spare = False
            joined = self._tell_all(state, Message("spare-joined", 0))
            # It catches up as a worker that was lost does: the run is under way.
            sizes = event.num_samples, event.epoch_cost
            return [*joined, *self._pass_on(state, Started(True, *sizes, state.layout), now)]
        return [*self._announce(state, now), *self._begin(state, now)]

    def _welcome(self, state: BalancedState, event: WorkerJoined, now: Seconds) -> list[Effect]:
        state.lost.pop(event.rank, None)
        if event.has_restarted:
            state.forecasts.pop(event.rank, None)  # of its previous life, with the data of then
        # It has missed what was announced in the meantime.
        has_joined = state.rank in self.spares and not state.is_spare
        missed = [Message("spare-joined", 0)] if has_joined else []
        if own := state.forecasts.get(state.rank):
            missed.append(own.message())
        told: list[Effect] = [Send(event.rank, message) for message in missed]
        return told if event.rank in self.spares else [*told, *self._pass_on(state, event, now)]


_REST: Seconds = 1.0  # pause of a failed platform that knows of no training worker
