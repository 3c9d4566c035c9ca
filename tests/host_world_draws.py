"""The worlds of peers that seeds draw for real hosts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from tests.algorithms import (
    ALL,
    NUM_WORKERS,
    PEERS,
)
from tests.host_worlds import KINDS, LIES, Disturbance, World
from tests.oracles import OFFSET
from tests.varied import longer, num_workers_of, resized, smaller
from tests.virtual_network import Wire

from edgegossip.contract.algorithm import opened
from edgegossip.contract.protocol import Rank, Seconds


def draw_world(seed: int, name: str | None = None) -> World:
    draw = random.Random(seed)
    name = name or [*PEERS][seed % len(PEERS)]
    is_liar = draw.random() < 0.15
    # Two honest ones have to contradict one that lies.
    algorithm = smaller(ALL[name], NUM_WORKERS if is_liar else draw.choice([3, 3, 4, 5]))
    num_workers = num_workers_of(algorithm)
    slowest = draw.choice([1, 2, 8])
    step_seconds = tuple(0.2 * slowest ** draw.random() for _ in range(num_workers))
    bad = draw.random()
    wire = Wire(
        latency=(0.001, draw.choice([0.005, 0.05, 0.3])),
        bandwidth=draw.choice([1e7, 1e5]),
        late=0.1 if 0.4 < bad < 0.55 else 0.0,
        lost=0.01 if bad > 0.9 else 0.0,
        twice=0.1 if 0.55 < bad < 0.7 else 0.0,
    )
    has_trouble = not is_liar or draw.random() < 0.3
    return World(
        seed=seed,
        name=name,
        algorithm=longer(algorithm, draw.choice([0.5, 0.5, 1, 2])),
        step_seconds=step_seconds,
        start_at=draw_starts(draw, num_workers),
        wire=wire,
        disturbances=draw_disturbances(draw, num_workers) if has_trouble else (),
        meet_seconds=draw.choice([2.5, 5.0]),
        checkpoint_seconds=draw.choice([2.0, math.inf]),
        disk_fails=draw.choice([0.0, 0.0, 0.5, 1.0]),
        liar=draw.randrange(num_workers) if is_liar else None,
        lie=draw.choice(LIES) if is_liar else "",
        offset=OFFSET if name in PEERS else 0.0,
    )


CORE = (
    *("gossip", "epoch-gossip", "gosgd", "stochastic-gradient-push", "all-reduce"),
    *("adpsgd", "swift", "diloco", "choco-gossip", "epoch-gossip-balanced-exact"),
)
"""Peers of each way to wait, and to keep what was sent."""
NEWER = (
    *("edge-squeeze", "double-squeeze-overlapping", "streaming-diloco", "sparseloco"),
    *("gasloc", "noloco", "div-share", "epidemic-learning"),
)
"""Peers that came later; the others of `PEERS` differ from these in what they mix."""


def _core_name(seed: int) -> str:
    """One of `CORE`, or for some seeds of `NEWER`: the others' worlds stay as they were."""
    draw = random.Random(f"{seed} newer")
    return draw.choice(NEWER) if draw.random() < 0.4 else CORE[seed % len(CORE)]


def draw_resuming_world(seed: int) -> World:
    """The world of `seed` whose workers are stopped or killed, and mostly resume."""
    draw, world = random.Random(f"{seed} resuming"), _draw_core_world(seed)
    often = random.Random(f"{seed} often")
    if world.name in ("gosgd", "adpsgd", "swift", "div-share") and often.random() < 0.5:
        return _with_returns(often, world)
    stale = random.Random(f"{seed} stale")
    if stale.random() < 0.05:
        return _with_stale_checkpoint(stale, world)
    found, at = [], draw.uniform(1.0, 4.0)
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(["stop all", "stop", "stop", "kill", "kill", "cut", "partition"])
        disturbance = _draw_disturbance(draw, kind, at, world.num_workers)
        if kind == "stop":
            # Others count it as lost after three seconds.
            disturbance = replace(disturbance, seconds=draw.choice([0.3, 1.0, 1.0, 10.0]))
        if kind == "kill":
            # Others wait for one that is back so soon.
            disturbance = replace(disturbance, seconds=draw.choice([0.05, 0.3, 0.8]))
        found.append(replace(disturbance, with_disk=draw.random() < 0.9))
        at += draw.uniform(0.5, 4.0)
    return replace(
        world,
        disturbances=tuple(found),
        checkpoint_seconds=draw.choice([0.3, 1.0, 2.0]),
        disk_fails=draw.choice([0.0, 0.0, 0.3]),
        # Sometimes for one message, or none: each takes 1 kB and its payload.
        log_bytes=draw.choice([2**26] * 6 + [1200, 500]),
    )


def _with_returns(draw: random.Random, world: World) -> World:
    """The same in which workers that never wait come back again and again, to busy others.

    Either the others have forgotten some messages, and one resumes; or one must begin anew, and
    a link ends as it carries its first messages.
    """
    is_forgetful, found, at = draw.random() < 0.5, [], draw.uniform(1.5, 3.0)
    for _ in range(4):
        rank, other = draw.sample(range(world.num_workers), 2)
        away = draw.uniform(1.5, 2.8) if is_forgetful else 0.3
        kind = "stop" if is_forgetful else "kill"
        found.append(Disturbance(kind=kind, at=at, ranks=(rank,), seconds=away))
        if not is_forgetful:
            ends_at = at + away + draw.uniform(0.3, 1.0)
            found.append(Disturbance(kind="interruption", at=ends_at, ranks=(rank, other)))
        at += away + draw.uniform(1.5, 2.5)
    latency = (0.001, 0.05) if is_forgetful else (0.2, 0.3)
    return replace(
        world,
        algorithm=longer(world.algorithm, 3),
        disturbances=tuple(found),
        wire=replace(world.wire, latency=latency, late=0.0),
        checkpoint_seconds=0.3,
        log_bytes=1200 if is_forgetful else world.log_bytes,
    )


def _with_stale_checkpoint(draw: random.Random, world: World) -> World:
    """The same in which one begins a new life, and after a stop of all is in its former one."""
    at, rank = draw.uniform(1.5, 3.0), draw.randrange(world.num_workers)
    away = draw.choice([0.05, 0.3, 0.8])
    stops_at = at + draw.uniform(3.0, 6.0)
    found = (
        Disturbance(kind="full disk", at=at, ranks=(rank,)),
        Disturbance(kind="kill", at=at, ranks=(rank,), seconds=away, with_disk=False),
        Disturbance(kind="stop all", at=stops_at, ranks=(), seconds=draw.uniform(1.0, 3.0)),
    )
    return replace(
        world,
        algorithm=longer(world.algorithm, 3),
        disturbances=found,
        checkpoint_seconds=0.3,
    )


def draw_cut_world(seed: int) -> World:
    """The world of `seed` whose links are cut again and again, around a lease long.

    In some, what is in a link is lost again and again, but no link ends. In some of these, one
    end has no memory then, so that it does not even hear what the other lacks. In a few, nobody
    hears of the others' end, or one stalls for very long.
    """
    draw, world = random.Random(f"{seed} cuts"), _draw_core_world(seed)
    style = draw.choice(["cuts"] * 3 + ["interruptions"] * 3 + ["unheard"])
    kinds = ["cut", "cut", "one way cut", "pause", "partition", "interruption", "stall"]
    found, at = [], draw.uniform(0.5, 3.0)
    for _ in range(draw.randint(2, 5) * (1 if style == "cuts" else 2)):
        kind = draw.choice(kinds) if style == "cuts" else "interruption"
        disturbance = _draw_disturbance(draw, kind, at, world.num_workers)
        # The others give up on one that stalls after about 14 s.
        seconds = draw.choice([15.0, 20.0] if kind == "stall" else [0.3, 1.0, 2.0, 3.0, 6.0])
        found.append(replace(disturbance, seconds=seconds))
        if style == "unheard":
            found.append(
                Disturbance(kind="full", at=at, ranks=disturbance.ranks[:1], seconds=1.5)
            )
        at += draw.uniform(0.3, 4.0) if style == "cuts" else draw.uniform(0.1, 2.0)
    if random.Random(f"{seed} end").random() < 0.15:
        found.append(Disturbance(kind="unheard end", at=0.0, ranks=(), seconds=3.0))
    # Over thin links, messages still wait for the old link when there is a new one.
    bandwidth = draw.choice([world.wire.bandwidth, 2e3])
    wire = replace(world.wire, bandwidth=bandwidth)
    stall = random.Random(f"{seed} stall")
    if stall.random() < 0.1:
        return _with_stall(stall, world)
    return replace(world, disturbances=tuple(found), wire=wire)


def _with_stall(draw: random.Random, world: World) -> World:
    """The same in which one stalls for much longer than any other waits for it."""
    at, rank = draw.uniform(5.0, 8.0), draw.randrange(world.num_workers)
    stall = Disturbance(kind="stall", at=at, ranks=(rank,), seconds=300.0)
    return replace(world, algorithm=longer(world.algorithm, 2), disturbances=(stall,))


def draw_late_world(seed: int) -> World:
    """The world of `seed` in which one comes late, or again, while another is gone for good.

    Its machine was told to wait for all for much longer than those who have begun have.
    """
    draw, world = random.Random(f"{seed} late"), _draw_core_world(seed)
    gone, late = draw.sample(range(world.num_workers), 2)
    at = draw.uniform(0.5, 3.0)
    found = [Disturbance(kind="kill", at=at, ranks=(gone,), seconds=math.inf)]
    starts = [0.0] * world.num_workers
    if draw.random() < 0.5:
        starts[late] = world.meet_seconds + draw.uniform(1.0, 3.0)
    else:
        killed = Disturbance(
            kind="kill",
            at=draw.uniform(2.0, 4.0),
            ranks=(late,),
            seconds=draw.uniform(0.05, 2.0),
            with_disk=draw.random() < 0.5,
        )
        found.append(killed)
    return replace(
        world,
        algorithm=longer(world.algorithm, 3),
        start_at=tuple(starts),
        disturbances=tuple(found),
        late_meet_seconds=60.0,
        rise=draw.choice([0.0, 3e4]),
    )


def draw_lying_world(seed: int) -> World:
    """The world of `seed` in which one lies, and others may come late or again."""
    draw, world = random.Random(f"{seed} lies"), _draw_core_world(seed, num_workers=4)
    starts = draw_starts(draw, world.num_workers)
    kills = [_draw_disturbance(draw, "kill", draw.uniform(1.0, 4.0), world.num_workers)]
    return replace(
        world,
        start_at=starts,
        disturbances=tuple(kills if draw.random() < 0.3 else ()),
        liar=draw.randrange(world.num_workers),
        lie=draw.choice(LIES),
    )


def _draw_core_world(seed: int, num_workers: int | None = None) -> World:
    """A world of `seed` without trouble, in which frames may be late or come twice."""
    name, draw = _core_name(seed), random.Random(f"{seed} core")
    algorithm = smaller(ALL[name], num_workers or draw.choice([3, 3, 4]))
    bad, number = draw.random(), num_workers_of(algorithm)
    return replace(
        draw_world(seed, name),
        algorithm=longer(algorithm, draw.choice([1, 2])),
        step_seconds=tuple(0.2 * 2 ** draw.random() for _ in range(number)),
        start_at=(0.0,) * number,
        wire=Wire(
            latency=(0.001, draw.choice([0.005, 0.05, 0.3])),
            bandwidth=draw.choice([1e7, 1e5]),
            late=0.1 if bad < 0.2 else 0.0,
            twice=0.2 if bad > 0.6 else 0.0,
        ),
        disturbances=(),
        meet_seconds=draw.choice([2.5, 5.0]),
        checkpoint_seconds=draw.choice([2.0, math.inf]),
        disk_fails=0.0,
        liar=None,
        lie="",
    )


def draw_open_world(seed: int) -> World:
    """The world of `seed` with up to 16 workers of an open run, many of which come and go."""
    names = [name for name in PEERS if "choco" not in name]
    name = names[seed % len(names)]
    draw = random.Random(f"{seed} open")
    # Mostly few, because messages grow with the square of their number.
    sizes = [3, 3, 3, 4, 4, 4, 5, 5, 6] * 3 + [8, 8, 16]
    algorithm = opened(resized(ALL[name], draw.choice(sizes)))
    num_workers = num_workers_of(algorithm)
    world = draw_world(seed, name)
    starts = [0.0] * num_workers
    for rank in draw.sample(range(num_workers), draw.randint(1, num_workers - 1)):
        starts[rank] = draw.uniform(1.5, 15.0)
    found, at = [], draw.uniform(2.0, 5.0)
    for _ in range(draw.randint(0, 4)):
        kind = draw.choice(["kill", "leave", "leave", "partition"])
        ranks = draw.sample(range(num_workers), 1 if kind != "partition" else num_workers // 2)
        seconds = draw.choice([0.05, 0.8, 4.0] + ([] if kind == "partition" else [math.inf]))
        disturbance = Disturbance(
            kind=kind,
            at=at,
            ranks=tuple(ranks),
            seconds=seconds,
            with_disk=draw.random() < 0.5,
        )
        found.append(disturbance)
        at += draw.uniform(0.0, 6.0)
    return replace(
        world,
        algorithm=longer(algorithm, draw.choice([1, 1, 2, 3])),
        step_seconds=tuple(0.2 * 2 ** draw.random() for _ in range(num_workers)),
        start_at=tuple(starts),
        disturbances=tuple(found),
        liar=None,
        lie="",
        is_open=True,
    )


def draw_starts(draw: random.Random, num_workers: int) -> tuple[Seconds, ...]:
    """Most worlds start together; in others some come later, together or one by one."""
    starts = [draw.uniform(0.0, 0.5) for _ in range(num_workers)]
    if draw.random() < 0.3:
        together = draw.uniform(1.0, 12.0)
        for rank in draw.sample(range(num_workers), draw.randint(1, num_workers - 1)):
            starts[rank] = together + draw.uniform(0.0, draw.choice([0.2, 3.0]))
    return tuple(start if start > 0.5 else 0.0 for start in starts)


def draw_disturbances(draw: random.Random, num_workers: int) -> tuple[Disturbance, ...]:
    found, at = [], draw.uniform(0.5, 4.0)
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        found.append(_draw_disturbance(draw, draw.choice(KINDS), at, num_workers))
        at += draw.uniform(0.0, 8.0)
    return tuple(found)


def _draw_disturbance(
    draw: random.Random, kind: str, at: Seconds, num_workers: int
) -> Disturbance:
    everyone = range(num_workers)
    seconds = draw.choice([0.3, 2.0, 5.0, 10.0, 30.0])
    ranks: Sequence[Rank] = draw.sample(everyone, 1)
    if kind == "partition":
        ranks = draw.sample(everyone, draw.randint(1, 2))
    elif kind in ("cut", "one way cut", "interruption"):
        ranks = draw.sample(everyone, 2)
    elif kind == "kill":
        ranks = draw.sample(everyone, draw.choice([1, 1, 2]))
        seconds = draw.choice([0.05, 0.8, 4.0, math.inf])
    elif kind == "stop all":
        ranks, seconds = (), draw.uniform(1.0, 5.0)
    return Disturbance(
        kind=kind, at=at, ranks=tuple(ranks), seconds=seconds, with_disk=draw.random() < 0.6
    )
