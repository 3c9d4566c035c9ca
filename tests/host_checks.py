"""Checks of worlds of real hosts."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from tests.algorithms import server_in
from tests.host_runs import LEASE, Run
from tests.host_worlds import World
from tests.host_wrappers import Ledger
from tests.oracles import ViolationError
from tests.virtual_process import Process
from tests.worlds import stages_in

from edgegossip.algorithms.gossip.gosgd import GoSGDState
from edgegossip.algorithms.push_sum.push_sum import PushSumState
from edgegossip.algorithms.server.async_local_sgd import FedBuff
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.halos import HALoS
from edgegossip.algorithms.server.methods import BSP
from edgegossip.algorithms.server.parameter_server import ServerState
from edgegossip.algorithms.server.worker import SERVER
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.contract.algorithm import Algorithm
from edgegossip.contract.errors import ServerLostError
from edgegossip.contract.protocol import Rank, Seconds, WorkerState
from edgegossip.real.agreement import agreement_of

NOTICED: Seconds = 2 * LEASE
"""A worker that hangs is missed after at most this."""
SLACK: Seconds = 2.0
"""Beyond a round: until a link is open again, statuses were exchanged, and a step is done."""


def check(world: World) -> Run:
    """Run `world` and look at what has come of it; raises a `ViolationError`."""
    run = Run(world)
    has_ended = run.to_the_end()
    run.oracles.conclude()
    honest = {r: p for r, p in run.processes.items() if r != world.liar and p.is_alive}
    for rank, process in honest.items():
        if isinstance(process.reason, BaseException):
            raise ViolationError(f"worker {rank} raised {process.reason!r}") from process.reason
    if not has_ended and any(p.is_running for p in honest.values()):
        rounds = {rank: p.host.state.round for rank, p in honest.items()}
        raise ViolationError(f"hang: rounds {rounds} at {run.time.now:.0f} s")
    for rank, process in honest.items():
        if rank in run.gone and process.reason == "interrupted":
            continue
        end, total = process.host.state.round, world.algorithm.traits.num_rounds
        if process.reason != "finished" or end != total:
            raise ViolationError(
                f"worker {rank} ended early: {process.reason}, round {end} of {total}"
            )
    if not world.loses and not world.is_thin:
        require_progress(run)
        require_joining(run)
    require_sums(run)
    require_little_memory(run)
    return run


def check_staged(world: World) -> Run:
    """Run the world of a model in stages.

    Who has data comes to the end, unless it waits for a stage that does not come back; nobody
    keeps more batches than it is to.
    """
    run, stages = Run(world), stages_in(world.algorithm)
    assert stages is not None
    if not run.to_the_end():
        raise ViolationError("it does not come to an end")
    run.oracles.conclude()
    for rank, process in run.processes.items():
        if not process.is_alive:
            continue
        state, total = process.host.state, stages.traits.num_rounds
        if process.reason not in ("finished", "time limit") and not isinstance(
            process.reason, ServerLostError
        ):
            raise ViolationError(f"worker {rank} ended with {process.reason!r}")
        if process.reason == "finished" and state.inner is not None and state.round != total:
            raise ViolationError(f"worker {rank} ended in round {state.round} of {total}")
        most = stages.max_passed(stages.stage(rank))
        if max(len(state.pending), len(state.answers), len(state.origins) - 1) > most:
            raise ViolationError(f"worker {rank} keeps too much")
    require_little_memory(run)
    return run


def check_server(world: World) -> Run:
    """Run the world of a parameter server; who comes after its end is told so, and only they.

    Barriers hold others up for as long as it takes to notice one that is lost, so nothing is
    said of pauses.
    """
    run = Run(world, Ledger(world.algorithm))
    run.to_the_end()
    run.oracles.conclude()
    server = run.processes[SERVER]
    if server.reason != "finished":
        raise ViolationError(f"the server ended with {server.reason!r}")
    for rank, process in run.processes.items():
        if rank == world.liar or not process.is_alive or process.reason == "finished":
            continue
        if not isinstance(process.reason, ServerLostError):
            raise ViolationError(f"worker {rank} ended with {process.reason!r}")
    require_commits(run, server.host.state)
    require_little_memory(run)
    return run


def check_standby(world: World) -> Run:
    """Run the world; who is with most comes to the end, with one server that counts all."""
    run = Run(world, Ledger(world.algorithm))
    assert run.ledger is not None
    run.ledger.clock = lambda: run.time.now
    run.to_the_end()
    run.oracles.conclude()
    for rank, process in run.processes.items():
        if rank == world.liar or not process.is_alive or process.reason == "finished":
            continue
        if not isinstance(process.reason, ServerLostError):
            raise ViolationError(f"worker {rank} ended with {process.reason!r}")
    require_little_memory(run)
    require_succession(run)
    states = [process.host.state for process in run.processes.values() if process.is_alive]
    for state in states:
        if state.server is not None and not state.election.is_leading:
            raise ViolationError(f"rank {state.rank} serves on, though it follows another")
    servers = [state for state in states if state.is_evaluated]
    if servers:
        require_commits(run, max(servers, key=lambda state: state.election.term).server)
    return run


def check_sharing(world: World) -> Run:
    """Run the world; servers come to the end and agree on what their slices hold.

    Workers do, too, unless they are cut off or stopped until the servers have left.
    """
    run = Run(world)
    run.to_the_end()
    run.oracles.conclude()
    servers: Any = range(world.algorithm.num_servers)  # type: ignore[attr-defined]
    for rank, process in run.processes.items():
        if not process.is_alive or process.reason == "finished":
            continue
        if rank in servers or not isinstance(process.reason, ServerLostError):
            raise ViolationError(f"rank {rank} ended with {process.reason!r}")
    counts = [run.processes[rank].host.state.inner.num_commits for rank in servers]
    if any(each != counts[0] for each in counts):
        raise ViolationError(f"servers count different commits: {counts}")
    require_little_memory(run)
    return run


def check_regions(world: World) -> Run:
    """Run the world of servers of regions, and of a global one; all servers come to the end.

    Workers do, too, unless they are cut off or stopped until their server has left.
    """
    run = Run(world, Ledger(world.algorithm))
    run.to_the_end()
    run.oracles.conclude()
    algorithm = world.algorithm
    assert isinstance(algorithm, HALoS)
    for rank, process in run.processes.items():
        if not process.is_alive or process.reason == "finished":
            continue
        if rank <= algorithm.num_regions or not isinstance(process.reason, ServerLostError):
            raise ViolationError(f"rank {rank} ended with {process.reason!r}")
    require_sums_of_regions(run, algorithm)
    require_little_memory(run)
    return run


def check_final(world: World) -> Run:
    """Run a world that ends with one mean: all finish, and models that differ are named."""
    run = Run(world)
    has_ended = run.to_the_end()
    run.oracles.conclude()
    here = {rank: each for rank, each in run.processes.items() if each.is_alive}
    # A worker whose server does not come back says so, and has no final model.
    present = {r: p for r, p in here.items() if not isinstance(p.reason, ServerLostError)}
    for rank, process in present.items():
        if isinstance(process.reason, BaseException):
            raise ViolationError(f"worker {rank} raised {process.reason!r}") from process.reason
        if not has_ended or process.reason != "finished":
            raise ViolationError(f"worker {rank} ended early: {process.reason}")
    if found := unnamed_differences(world.algorithm, [*present.values()]):
        raise ViolationError("; ".join(found))
    require_final_models(run)
    return run


def require_final_models(run: Run) -> None:
    """One that had ended when it was restarted keeps the model that the others have of it."""
    for process, told in run.oracles.told:
        before, after = told.final, process.host.state.models.get(process.rank)
        if before is not None and after is not None and not torch.equal(before, after):
            raise ViolationError(f"worker {process.rank} is back with another final model")


def unnamed_differences(algorithm: Algorithm[Any], ended: Sequence[Process]) -> list[str]:
    """The pairs of workers that end with different models though neither says so."""
    found = []
    for one, other in itertools.combinations(ended, 2):
        models = [each.host.state.estimate.double() for each in (one, other)]
        distance = float((models[0] - models[1]).norm() / (models[0].norm() + 1e-12))
        said = [agreement_of(algorithm, each.host) for each in (one, other)]
        if distance > 1e-5 and not any(each and [*each.lines()] for each in said):
            found.append(
                f"workers {one.rank} and {other.rank} end {distance:.2g} apart: {said}"
            )
    return found


def require_progress(run: Run) -> None:
    """Nobody stands still for long because of others."""
    world = run.world
    onsets = [each.at for each in world.disturbances]
    onsets += [each.at + each.seconds for each in world.disturbances if each.seconds < math.inf]
    for rank, moments in run.watcher.moments.items():
        if rank in world.disturbed:
            continue
        for before, after in pairwise(moments):
            noticing = sum(
                NOTICED + 1.0 for at in onsets if before - 2 * NOTICED <= at <= after
            )
            stalls = sum(
                min(each.seconds, world.patience)
                for each in world.disturbances
                if each.kind == "stall"
            )
            allowed = world.longest_wait + SLACK + noticing + stalls + world.deadline
            if after - before > allowed:
                raise ViolationError(
                    f"worker {rank} stood still from {before:.2f} to {after:.2f} s: "
                    f"{after - before:.2f} s, allowed {allowed:.2f}"
                )


def longest_pause(run: Run, ranks: Sequence[Rank], after: Seconds) -> Seconds:
    """The longest time that one of `ranks` stood still, counted from `after` on."""
    return max(
        max(0.0, end - max(start, after))
        for rank in ranks
        for start, end in pairwise(run.watcher.moments[rank])
    )


def require_joining(run: Run) -> None:
    """Those who come late, or again, train within ten seconds of the last one's start."""
    world = run.world
    last = max(at for at, _ in run.starts)
    hit = [each.at + each.seconds for each in world.disturbances if each.seconds < math.inf]
    begun = max([last, *(at for at in hit)]) + 10.0 + 2 * world.round_seconds
    for at, rank in run.starts:
        process = run.processes[rank]
        if process.started_at != at or not process.is_alive or world.liar is not None:
            continue  # one that rejoins waits for the answers of all, up to a deadline
        if any(
            each.kind == "leave" and rank in each.ranks and at <= each.at <= begun
            for each in world.disturbances
        ):
            continue
        moments = [moment for moment in run.watcher.trained_at[rank] if moment > at]
        has_finished = not moments and process.reason == "finished"  # nothing was left
        if not has_finished and (not moments or moments[0] > begun + NOTICED):
            when = f"{moments[0]:.1f} s" if moments else "never"
            raise ViolationError(f"worker {rank} started at {at:.1f} s, went on at {when}")


def require_sums(run: Run) -> None:
    """Weights are conserved where nothing is lost."""
    world = run.world
    if world.loses or world.liar is not None or world.disturbances or any(world.start_at):
        return
    states = [getattr(p.host.state, "inner", p.host.state) for p in run.processes.values()]
    if isinstance(states[0], GoSGDState):
        _require_sum(sum(s.weight for s in states), 1.0)
    elif isinstance(states[0], PushSumState):
        _require_sum(
            sum(s.weight + sum(m.weight for m in s.arrived) for s in states), world.num_workers
        )


def require_succession(run: Run) -> None:
    """Where the server alone is killed, there is another soon, with all that was answered."""
    (killed, *others), ledger = run.world.disturbances or (None,), run.ledger
    if killed is None or others or killed.kind != "kill" or killed.ranks != (SERVER,):
        return
    if run.world.liar is not None or any(run.world.start_at) or run.world.loses:
        return
    assert ledger is not None
    for rank, process in run.processes.items():
        if process.is_alive and process.reason != "finished":
            raise ViolationError(f"worker {rank} ended with {process.reason!r}")
    for term, at in [*ledger.began.items()][1:2]:
        if at > killed.at + NOTICED + 3.0:
            raise ViolationError(f"killed at {killed.at:.2f} s, term {term} from {at:.2f} s")
    if missing := [each for each in ledger.lost if each[2] > 1]:
        raise ViolationError(f"lost (term, worker, commits): {missing}")


def require_commits(run: Run, state: WorkerState) -> None:
    """The server's model has each commit that it counts exactly once, and those it answered."""
    algorithm = server_in(run.world.algorithm)  # type: ignore[arg-type]
    assert isinstance(state, ServerState)
    assert run.ledger is not None
    if getattr(algorithm, "robust", None) is not None:
        return  # a rule weighs each commit anew, against those of the others
    num_workers = algorithm.num_workers
    # Those who commit behind a barrier share it with all, or with those who are left.
    world = run.world
    is_calm = not (world.disturbances or world.disturbed or world.loses)
    most = 1 / num_workers if is_calm or not isinstance(algorithm, BSP) else 1.0
    for rank in algorithm.workers:
        num_merged, sent = state.num_commits[rank], run.ledger.steps.get(rank, {})
        counted = [sent.get(number, {0}) for number in range(1, num_merged + 1)]
        found = float(state.params[rank])
        low, high = sum(map(min, counted)) / num_workers, most * sum(map(max, counted))
        if isinstance(algorithm, BSP):
            # Whoever is away while a barrier closes comes too late with one commit.
            most_late = run.ledger.num_absences[rank] * max(map(max, counted), default=0)
            low -= most_late / num_workers
        if isinstance(algorithm, DecoupledDiLoCo):
            # Those who come in time share a merge with each other, by their samples.
            low, high = 0.0, sum(map(max, counted))
        if isinstance(algorithm, FedBuff) and not is_calm:
            # A server that comes back without its memory has lost what was in the buffer.
            low -= (algorithm.buffer_size - 1) * max(map(max, counted), default=0) / num_workers
        if _may_forget(world):
            # One that was away goes on numbering where it was. What it did under the same
            # numbers before may be in the model as well.
            low, high = 0.0, high * run.ledger.num_lives[rank]
        if not low - 1e-3 <= found <= high + 1e-3:
            raise ViolationError(
                f"the model has {found:g} steps of worker {rank}, not {low:g} to {high:g}: "
                f"{num_merged} commits"
            )
        num_answered = run.ledger.num_answered.get(rank, 0)
        if num_merged < num_answered and not _may_forget(world):
            raise ViolationError(
                f"the server has {num_merged} commits of worker {rank}, and answered "
                f"{num_answered}"
            )


def require_sums_of_regions(run: Run, algorithm: HALoS) -> None:
    """The global model has each commit at most once, and all if no server was lost."""
    assert run.ledger is not None
    servers = range(1 + algorithm.num_regions)
    is_forgetful = any(
        each.kind == "stop all" or {*servers}.intersection(each.ranks)
        for each in run.world.disturbances
    )
    model = run.processes[SERVER].host.state.estimate
    for region in range(algorithm.num_regions):
        server, *workers = algorithm.members(region)
        local = run.processes[server].host.state.local
        rate = algorithm.local_lr / len(workers) * algorithm.global_lr / algorithm.num_regions
        for place, rank in enumerate(workers, 1):
            sent = run.ledger.steps.get(rank, {})
            numbers = range(1, local.num_commits[place] + 1)
            counted = [sent.get(number, {0}) for number in numbers]
            low, high = rate * sum(map(min, counted)), rate * sum(map(max, counted))
            if is_forgetful:
                low, high = 0.0, high * run.ledger.num_lives[rank]
            found = float(model[rank])
            if not low - 1e-3 <= found <= high + 1e-3:
                raise ViolationError(
                    f"the global model has {found:g} of worker {rank}, not {low:g} to {high:g}"
                )


def _may_forget(world: World) -> bool:
    """The server is lost while some workers, who know most, may be away."""
    if isinstance(world.algorithm, Standby):  # any may be the server, and be lost
        return bool(world.disturbed - {SERVER} or world.disturbances[1:] or world.loses)
    is_killed = any(SERVER in each.ranks for each in world.disturbances)
    # Unless a stop surely leaves a checkpoint, the server comes back with less than it had, and
    # so do the workers, who were away as well.
    has_disk = world.checkpoint_seconds < math.inf and not world.disk_fails
    stops = [each for each in world.disturbances if each.kind == "stop all"]
    is_forgetful = any(not (has_disk and each.with_disk) for each in stops)
    # Those who know most are also away while all are stopped.
    are_away = bool(world.disturbed > {SERVER} or stops or world.loses)
    return is_forgetful or (is_killed and are_away)


def _require_sum(found: float, expected: float) -> None:
    if abs(found - expected) > 1e-9:
        raise ViolationError(f"weights add up to {found}, not to {expected}")


def require_little_memory(run: Run) -> None:
    """Nothing is kept that nobody needs."""
    for rank, process in run.processes.items():
        held = process.host.receiving.budget.num_bytes
        if held > 2**20 + run.world.num_workers * 2**16:
            raise ViolationError(f"worker {rank} holds {held} bytes")


def digest(run: Run) -> str:
    """Equal for equal traces only."""
    return hashlib.sha256(repr(run.watcher.trace).encode()).hexdigest()
