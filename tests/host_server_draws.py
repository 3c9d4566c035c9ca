"""The worlds that seeds draw for servers, stages and final averages on real hosts."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from tests.algorithms import (
    PARAMETER_SERVERS,
    REGIONS,
    SEVERAL_SERVERS,
    STAGES,
    STANDBYS,
    AnyServer,
    server_in,
    with_settings,
)
from tests.host_world_draws import draw_disturbances, draw_world
from tests.host_worlds import SIZE, Disturbance, World
from tests.varied import longer
from tests.virtual_network import Wire

from edgegossip.algorithms.server.async_local_sgd import AsyncLocalSGD, FedBuff
from edgegossip.algorithms.server.decoupled_diloco import DecoupledDiLoCo
from edgegossip.algorithms.server.heloco import HeLoCo
from edgegossip.algorithms.server.worker import SERVER
from edgegossip.contract.protocol import Seconds
from edgegossip.runs.final_average import FinalAverage

SERVER_ROUNDS = 10
"""Of a run with servers: a world costs as much as it has messages, however long it lasts."""
LASTING: Seconds = 8.0
"""Training of its fastest worker. What happens to it mostly happens as early."""


def draw_server_world(seed: int) -> World:
    """The world of `seed` for a parameter server; in half of them it is killed, and soon back.

    Nothing else happens to it: all others would wait for it.
    """
    world = draw_world(seed, [*PARAMETER_SERVERS][seed % len(PARAMETER_SERVERS)])
    spared = tuple(each for each in world.disturbances if SERVER not in each.ranks)
    starts = (0.0, *world.start_at[1:])
    draw = random.Random(f"{seed} server")
    if draw.random() < 0.5:
        with_disk = world.checkpoint_seconds < math.inf and draw.random() < 0.7
        away = draw.choice([0.05, 0.8, 4.0])
        killed = Disturbance(
            kind="kill",
            at=draw.uniform(1.0, 0.7 * LASTING),
            ranks=(SERVER,),
            seconds=away,
            with_disk=with_disk,
        )
        # Who comes when nobody else is there begins alone, and the server is not there to help.
        spared, starts = (*spared, killed), (0.0,) * len(starts)
    liar = None if world.liar == SERVER else world.liar
    world = replace(
        lasting(world, adding(world.algorithm)),
        disturbances=spared,
        start_at=starts,
        liar=liar,
        lie=world.lie if liar else "",
    )
    return with_slow_worker(seed, world)


def with_slow_worker(seed: int, world: World) -> World:
    """The same, or for some seeds one in which nothing happens but that one worker is slow.

    Others that do not wait for it have long finished when it has, and their patience would be
    over; after ten times their run they would leave.
    """
    draw = random.Random(f"{seed} slow")
    if draw.random() > 0.15:
        return world
    steps = [min(world.step_seconds)] * world.num_workers
    steps[draw.randrange(1, len(steps))] *= 8
    return replace(
        world,
        algorithm=longer(world.algorithm, 2),
        step_seconds=tuple(steps),
        start_at=(0.0,) * world.num_workers,
        disturbances=(),
        wire=replace(world.wire, lost=0.0),
        liar=None,
        lie="",
    )


def lasting(world: World, algorithm: AnyServer) -> World:
    """The world with `algorithm`, whose run takes the fastest worker about `LASTING`.

    The slowest one takes at most three times as long.
    """
    server = server_in(algorithm)
    step_seconds = LASTING / (SERVER_ROUNDS * (server.traits.local_steps or 3))
    least = min(world.step_seconds)
    return replace(
        world,
        algorithm=with_settings(algorithm, num_rounds=SERVER_ROUNDS, resend_after=1.0),
        step_seconds=tuple(
            step_seconds * min(3.0, each / least) for each in world.step_seconds
        ),
    )


def adding(algorithm: Any) -> Any:  # noqa: ANN401 - its own type
    """The same so that each commit adds 1 / M of its change, which the checks count."""
    match server_in(algorithm):
        case AsyncLocalSGD() | DecoupledDiLoCo():
            return with_settings(algorithm, outer_momentum=0.0)
        case FedBuff() as server:
            rate = server.buffer_size / server.num_workers
            return with_settings(algorithm, outer_lr=rate, staleness_power=0.0)
        case HeLoCo():
            still = {"aligned": 0.0, "max_shrink": 0.0}
            return with_settings(algorithm, outer_momentum=0.0, **still)
    return algorithm


def draw_standby_world(seed: int) -> World:
    """The world of `seed` in which workers elect another server; anything may happen to any.

    In half of them nothing does but that the server is killed, for good or for a while.
    """
    name = [*STANDBYS][seed % len(STANDBYS)]
    world = draw_world(seed, name)
    draw = random.Random(f"{seed} standby")
    world = lasting(world, adding(world.algorithm))
    changes: dict[str, Any] = {}
    if draw.random() < 0.5:
        killed = Disturbance(
            kind="kill",
            at=draw.uniform(1.0, 0.7 * LASTING),
            ranks=(SERVER,),
            seconds=draw.choice([0.05, 0.8, 4.0, math.inf]),
            with_disk=draw.random() < 0.5,
        )
        calm = Wire(latency=world.wire.latency, bandwidth=world.wire.bandwidth)
        changes |= {
            "disturbances": (killed,),
            "start_at": (0.0,) * world.num_workers,
            "liar": None,
            "lie": "",
            "wire": calm,
        }
    return with_slow_worker(seed, replace(world, **changes))


def draw_sharing_world(seed: int) -> World:
    """The world of `seed` in which servers share the model; in half, one of them is killed."""
    name = [*SEVERAL_SERVERS][seed % len(SEVERAL_SERVERS)]
    world = draw_world(seed, name)
    draw = random.Random(f"{seed} sharing")
    algorithm: Any = world.algorithm
    servers = range(algorithm.num_servers)
    spared = tuple(
        each
        for each in world.disturbances
        if each.kind != "stop all" and not {*servers}.intersection(each.ranks)
    )
    if draw.random() < 0.5:
        spared = (_one_killed(draw, servers),)
    return replace(
        lasting(world, algorithm),
        disturbances=spared,
        start_at=(0.0,) * world.num_workers,
        wire=replace(world.wire, lost=0.0),
        liar=None,
        lie="",
    )


def _one_killed(draw: random.Random, servers: range) -> Disturbance:
    """One of several servers is killed, and soon back."""
    return Disturbance(
        kind="kill",
        at=draw.uniform(1.0, 0.7 * LASTING),
        ranks=(draw.choice(servers),),
        seconds=draw.choice([0.05, 0.8, 4.0]),
        with_disk=draw.random() < 0.5,
    )


def draw_regions_world(seed: int) -> World:
    """The world of `seed` with regions, each with a server; in half, one of these, or the
    global server, is killed, and soon back.

    Else anything may happen to the workers, which share two regions.
    """
    draw = random.Random(f"{seed} regions")
    algorithm = replace(
        REGIONS["halos"],
        regions=draw.choice([(0, 1), (0, 1), (0, 0, 1), (0, 1, 1)]),
        num_rounds=SERVER_ROUNDS,
        resend_after=1.0,
        # Each commit adds a share of its change, which the checks count.
        local_momentum=0.0,
        global_momentum=0.0,
    )
    servers = range(1 + algorithm.num_regions)
    num_workers = len(servers) + len(algorithm.regions)
    step_seconds = LASTING / (SERVER_ROUNDS * algorithm.local_steps)
    disturbances = tuple(
        each
        for each in draw_disturbances(draw, num_workers)
        if not {*servers}.intersection(each.ranks)
    )
    starts = (0.0,) * num_workers
    if draw.random() < 0.5:
        disturbances = (_one_killed(draw, servers),)
    elif draw.random() < 0.3:
        starts = (*starts[:-1], draw.uniform(1.0, 6.0))
    return replace(
        draw_world(seed, "halos"),
        algorithm=algorithm,
        step_seconds=tuple(step_seconds * 3 ** draw.random() for _ in range(num_workers)),
        disturbances=disturbances,
        start_at=starts,
        liar=None,
        lie="",
    )


def draw_staged_world(seed: int) -> World:
    """The world of `seed` in which one model is trained in stages; anything may be lost.

    In some, the second stage is, for good; who waits for it has a timer that is minutes away.
    """
    name = [*STAGES][seed % len(STAGES)]
    world = draw_world(seed, name)
    algorithm = replace(STAGES[name], forget_after=2.0)
    draw = random.Random(f"{seed} doomed")
    if draw.random() < 0.05:
        at, second = draw.uniform(1.0, 6.0), algorithm.num_first
        killed = Disturbance(kind="kill", at=at, ranks=(second,), seconds=math.inf)
        still = (0.0,) * world.num_workers
        world = replace(world, start_at=still, disturbances=(killed,))
    return replace(world, algorithm=algorithm, liar=None, lie="")


def draw_final_world(seed: int) -> World:
    """A world of peers, or of a server and its workers, that ends with one mean of all."""
    draws = (draw_world, draw_world, draw_server_world, draw_standby_world)
    draw = random.Random(f"{seed} back")
    is_back = draw.random() < 0.1
    world = _draw_return(draw, seed) if is_back else draws[seed % len(draws)](seed)
    # A limit that comes amid the training, or never.
    ends_at = random.Random(f"{seed} limit").choice([math.inf, math.inf, 1000.0, 30.0])
    final = FinalAverage(inner=world.algorithm, num_workers=world.num_workers, ends_at=ends_at)
    # Differences are judged as shares of what models are, so these stay small.
    return replace(world, algorithm=final, liar=None, lie="", offset=0.0)


def _draw_return(draw: random.Random, seed: int) -> World:
    """A world of peers that do not wait; one has ended and is killed, while another is slow."""
    world = draw_world(seed, draw.choice(["adpsgd", "gosgd", "swift"]))
    slow, rank = draw.sample(range(world.num_workers), 2)
    steps = tuple(3.2 if each == slow else 0.2 for each in range(world.num_workers))
    traits = world.algorithm.traits
    assert traits.num_rounds is not None
    ends_at = 0.2 * traits.num_rounds * (traits.local_steps or SIZE)
    away = draw.choice([0.05, 0.8, 4.0])
    killed = Disturbance(
        kind="kill", at=draw.uniform(2, 4) * ends_at, ranks=(rank,), seconds=away
    )
    return replace(
        world,
        step_seconds=steps,
        start_at=(0.0,) * world.num_workers,
        disturbances=(killed,),
        checkpoint_seconds=0.5,
        disk_fails=0.0,
    )
