"""Environments that others can check: published machines, links and failures.

Every environment runs the same systems on one task, for the time in which its machines could
have done a number of passes over the data if they had never waited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edgegossip.contract.algorithm import opened
from edgegossip.contract.protocol import Rank, Seconds
from edgegossip.contract.ranges import check_range, check_ranges
from edgegossip.recipes.baselines import HOME_LINK, PHONE_LINK, phone_platforms
from edgegossip.recipes.environment_tasks import (
    TaskSettings,
    learning_rate,
    prepared,
)
from edgegossip.recipes.push_sum_comparison import layer_sizes
from edgegossip.recipes.systems import BASELINE, SYSTEMS, Crew, Machines, System
from edgegossip.recipes.tasks import CommonSettings, default_data_dir
from edgegossip.runs.experiment import Comparison, Experiment
from edgegossip.sim.fault import Arrival, Crash, Fault, Faults, Recover
from edgegossip.sim.link import Link, Links
from edgegossip.sim.platform import Platform, uneven
from edgegossip.sim.traces import availability as spot_times, batch_jobs, drift
from edgegossip.training.task import Task


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings(TaskSettings):
    """Settings of an environment; each recipe has its own defaults.

    Args:
        num_epochs: Passes over the data that all machines together could complete in a run if
            they always trained; None for the task's own number.
        seconds: Duration of a run; None for the time of `num_epochs`.
        num_workers: Number of machines, without a server.
        local_steps: Steps between two exchanges, with EdgeGossip those of the fastest machine;
            None for each system's default.
        exchange_probability: Probability of an exchange after a step, of systems that draw it,
            in [0, 1]; None for each system's default.
        windows: Number of check periods of ADSP in a run; None for the default.
        drift: Largest slowdown of machines whose speeds drift, hidden from their monitors; 1
            for none.
        loads: Run jobs like WordCount and Sort on the machines during training.
        num_evaluations: Number of evaluations of each run.
    """

    num_epochs: float | None = None
    seconds: Seconds | None = None
    num_workers: int = 8
    local_steps: int | None = None
    exchange_probability: float | None = None
    windows: int | None = None
    drift: float = 1.0
    loads: bool = False
    num_evaluations: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, num_epochs="above 0 and finite, or None", num_workers="at least 1")
        check_ranges(self, seconds="above 0 and finite, or None", drift="at least 1 and finite")
        check_ranges(self, num_evaluations="at least 1", local_steps="at least 1 or None")
        check_ranges(
            self, exchange_probability="in [0, 1] or None", windows="at least 1 or None"
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """Facts of a run on which links and failures depend.

    Args:
        seconds: Duration of the run.
        layer_sizes: Number of entries of each tensor in the model, in order.
        step_seconds: Duration of a step on the fastest machine.
        seed: Seed of the run.
    """

    seconds: Seconds
    layer_sizes: tuple[int, ...]
    step_seconds: Seconds
    seed: int


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Machines, links and failures.

    Args:
        platforms: The machines that train.
        link: Link between machines of one region.
        regions: Region of each machine; empty if there is one region.
        between: Links between regions, by pair of regions; both directions.
        faults: Crashes and returns of these machines.
        has_spare_server: Whether a server is an additional machine; else the first one serves,
            so that all systems have equally many machines.
    """

    platforms: tuple[Platform, ...]
    link: Link = HOME_LINK
    regions: tuple[int, ...] = ()
    between: tuple[tuple[Link, ...], ...] = ()
    faults: Faults = Faults()
    has_spare_server: bool = True

    @property
    def num_regions(self) -> int:
        """Number of regions."""
        return 1 + max(self.regions, default=0)

    @property
    def fastest(self) -> Rank:
        """The fastest machine."""
        speeds = [each.total_throughput for each in self.platforms]
        return speeds.index(max(speeds))

    def machines(self, used: Machines) -> Environment:
        """The environment of a system that uses these machines.

        A server is rank 0. An additional one is a machine beside the first one, as fast as the
        fastest machine and with the best connection of all, which does not fail. Servers of
        regions, in order, are such machines in their own regions.
        """
        num_servers = 1
        match used:
            case "all":
                return self
            case "all and a server" if not self.has_spare_server:
                return self
            case "the fastest":
                only = self.fastest
                return replace(
                    self,
                    platforms=(self.platforms[only],),
                    regions=(),
                    faults=_with_ranks(self.faults, {only: 0}),
                )
            case "all and servers of regions":
                num_servers = 1 + self.num_regions
        server = Platform(
            name="server",
            throughput=self.platforms[self.fastest].total_throughput,
            uplink=max(each.uplink for each in self.platforms),
            downlink=max(each.downlink for each in self.platforms),
        )
        moved = {rank: rank + num_servers for rank in range(len(self.platforms))}
        of_servers = (*self.regions[:1], *range(num_servers - 1)) if self.regions else ()
        return replace(
            self,
            platforms=((server,) * num_servers + self.platforms),
            regions=(*of_servers, *self.regions),
            faults=_with_ranks(self.faults, moved),
        )

    @property
    def links(self) -> Links:
        """The links between all machines."""
        regions = [*enumerate(self.regions)]
        return Links(
            default=self.link,
            overrides={
                (one, other): self.between[here][there]
                for one, here in regions
                for other, there in regions
                if here != there
            },
        )


def _with_ranks(faults: Faults, ranks: dict[Rank, Rank]) -> Faults:
    """The crashes and returns of the machines in `ranks`, with their new ranks."""
    script: list[Fault] = []
    for fault in faults.script:
        assert isinstance(fault, Arrival | Crash | Recover)  # an environment has no others
        if fault.rank in ranks:
            script.append(replace(fault, rank=ranks[fault.rank]))
    return replace(faults, script=tuple(script))


def compare_in(
    platforms: tuple[Platform, ...],
    surroundings: Callable[[Environment, Job], Environment],
    settings: EnvironmentSettings,
    data_dir: Path,
) -> Comparison:
    """Compare all systems in one environment on one task, for the same time.

    Args:
        platforms: Idle machines with throughputs relative to the fastest one's, which is 1.
        surroundings: Adds links and failures that depend on the job.
        settings: Settings of the environment.
        data_dir: Folder of the data sets.
    """
    task, throughput, num_epochs = prepared(settings, data_dir)
    scaled = tuple(replace(each, throughput=each.throughput * throughput) for each in platforms)
    total = sum(each.total_throughput for each in scaled)
    num_epochs = num_epochs if settings.num_epochs is None else settings.num_epochs
    passes = float(f"{num_epochs * len(task.dataset.train) / total:.3g}")
    seconds = passes if settings.seconds is None else settings.seconds
    job = Job(
        seconds=seconds,
        layer_sizes=layer_sizes(task),
        step_seconds=task.batch_size / throughput,
        seed=settings.seed,
    )
    busy = tuple(_busy(each, rank, settings, job) for rank, each in enumerate(scaled))
    environment = surroundings(Environment(platforms=busy), job)
    rates = tuple(float(f"{learning_rate(task) * factor:.3g}") for factor in (1.0, 3.0, 1 / 3))
    systems = {
        name: system
        for name, system in SYSTEMS.items()
        if environment.has_spare_server or system.machines in ("all", "all and a server")
    }
    return Comparison(
        experiments={
            name: _experiment(name, system, environment, task, settings, job)
            for name, system in systems.items()
        },
        baseline=BASELINE,
        target_gap=0.0,
        tunable={
            name: {system.setting: system.values, "lr": rates}
            for name, system in systems.items()
        },
    )


def _experiment(
    name: str,
    system: System,
    environment: Environment,
    task: Task,
    settings: EnvironmentSettings,
    job: Job,
) -> Experiment:
    own = environment.machines(system.machines)
    servers = {"all and a server": 1, "all and servers of regions": 1 + environment.num_regions}
    crew = Crew(
        num_workers=len(own.platforms) - servers.get(system.machines, 0),
        seconds=job.seconds,
        layer_sizes=job.layer_sizes,
        seed=settings.seed,
        regions=environment.regions if own.regions else (),
    )
    algorithm = system.build(crew, getattr(settings, system.setting))
    return Experiment(
        task=task,
        algorithm=opened(algorithm) if own.faults.absent else algorithm,
        platforms=own.platforms,
        links=own.links,
        faults=own.faults,
        seed=settings.seed,
        max_seconds=job.seconds,
        evaluation_interval=job.seconds / settings.num_evaluations,
        name=name,
    )


def _busy(platform: Platform, rank: Rank, settings: EnvironmentSettings, job: Job) -> Platform:
    """The platform with the loads and the drift of the settings."""
    own_seed = settings.seed * 1000 + rank
    if settings.loads:
        loads = batch_jobs(own_seed, phase=job.seconds / 50, period=job.seconds)
        platform = replace(platform, trace=loads)
    if settings.drift > 1:
        step = job.seconds / 50
        trace = drift(own_seed, most=settings.drift, step=step, period=job.seconds)
        platform = replace(platform, throttling=trace)
    return platform


# Environments.


HALOS_SPEEDS = (
    (0.232, 0.907, 0.828, 0.347),
    (0.574, 0.531, 0.722, 0.194),
    (0.852, 0.132, 0.896, 0.107),
    (0.827, 0.515, 0.527, 0.788),
)
"""Speeds of the four workers in each region; the authors' code divides them by the highest."""
HALOS_GIGABITS = (
    (100.0, 0.537, 0.935, 0.202),
    (0.537, 100.0, 0.386, 0.117),
    (0.935, 0.386, 100.0, 0.127),
    (0.202, 0.117, 0.127, 100.0),
)
"""Gigabits per second between regions."""
PYTHIA_BYTES = 281.7e6
"""Bytes of Pythia-70M in float32."""
PYTHIA_STEP: Seconds = 0.238391
"""Duration of its step of 64 samples on the fastest worker."""

HALOS = EnvironmentSettings(task="gpt-books", num_workers=16)
STRAGGLERS = EnvironmentSettings(task="cifar10-dirichlet")
CHURN = EnvironmentSettings(task="mnist")
PHONES = EnvironmentSettings(task="har", num_workers=21)
ONE_SLOW = EnvironmentSettings(task="mnist", num_workers=4)
OWN_MACHINES = EnvironmentSettings(task="mnist", num_workers=4)


def halos(
    settings: EnvironmentSettings = HALOS, *, data_dir: Path = default_data_dir()
) -> Comparison:
    """HALoS' 16 workers in four regions, a GPT on books: published speeds and bandwidths.

    Worker `r` is in region ``r % 4``. All links are scaled by one factor, (the model's bytes /
    Pythia-70M's) x (Pythia-70M's step time / the model's), which keeps the published ratio of
    communication to computation. Published links have no latency. Here a worker sends one
    message at a time, while in the authors' simulator messages do not share a link.

    Source: `examples/env.yaml` of github.com/utnslab/halos (ICML 2025, arXiv:2506.04531).

    Args:
        settings: Settings of the recipe; fewer than 16 workers are taken from the regions in
            turn.
        data_dir: Folder of the data sets; by default $EDGEGOSSIP_DATA.
    """
    regions = tuple(rank % 4 for rank in range(settings.num_workers))
    check_range("num_workers", settings.num_workers, "in [1, 16]")
    speeds = [HALOS_SPEEDS[region][rank // 4] for rank, region in enumerate(regions)]

    def connected(environment: Environment, job: Job) -> Environment:
        num_bytes = 4 * sum(job.layer_sizes)
        scale = num_bytes / PYTHIA_BYTES * PYTHIA_STEP / job.step_seconds
        between = tuple(
            tuple(Link(bandwidth=scale * gigabits * 1e9 / 8) for gigabits in row)
            for row in HALOS_GIGABITS
        )
        return replace(environment, link=between[0][0], regions=regions, between=between)

    return compare_in(_relative(speeds), connected, settings, data_dir)


def stragglers(
    settings: EnvironmentSettings = STRAGGLERS,
    *,
    straggler_share: float = 0.5,
    slowdown: float = 5.0,
    megabits: float = 60.0,
    speeds: tuple[float, ...] = (1.0,),
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Equal machines, half of them on slow links: communication stragglers, as in DivShare.

    The default bandwidths are those of the authors' topologies (60 and 12 Mbit/s, 1 ms), at
    which LeNet-5 (0.25 MB) takes 33 ms to send, and 0.17 s from a straggler.

    Source: `topologies` of github.com/sacs-epfl/divshare (WWW 2025, arXiv:2410.12918).

    Args:
        settings: Settings of the recipe.
        straggler_share: Share of the machines with slow links, in [0, 1]; those of the highest
            ranks.
        slowdown: Bandwidth of the other machines / that of stragglers, at least 1.
        megabits: Megabits per second of the other machines, each way.
        speeds: Speeds of the machines, which are repeated in turn.
        data_dir: Folder of the data sets; by default $EDGEGOSSIP_DATA.
    """
    check_range("straggler_share", straggler_share, "in [0, 1]")
    check_range("slowdown", slowdown, "at least 1 and finite")
    check_range("megabits", megabits, "above 0 and finite")
    first = round((1 - straggler_share) * settings.num_workers)

    def connected(environment: Environment, job: Job) -> Environment:
        platforms = []
        for rank, platform in enumerate(environment.platforms):
            speed = megabits * 1e6 / 8 / (slowdown if rank >= first else 1.0)
            platforms.append(replace(platform, uplink=speed, downlink=speed))
        link = Link(latency=0.001)
        return replace(environment, platforms=tuple(platforms), link=link)

    return compare_in(uneven(settings.num_workers, 1.0, speeds), connected, settings, data_dir)


def churn(
    settings: EnvironmentSettings = CHURN,
    *,
    mean_up: Seconds | None = None,
    mean_down: Seconds | None = None,
    detection_time: Seconds | None = None,
    availability: Path | None = None,
    series: str = "",
    hours: float = 24.0,
    speeds: tuple[float, ...] = (1.0,),
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Equal machines that fail and come back after exponential times, drawn from the seed.

    With `availability`, they come and go as spot machines did: many appear only during the run.

    A machine that comes back has forgotten everything. By default, a machine fails twice in a
    run on average, and is away for a hundredth of the run. A server does not fail. Goodput
    cannot exceed the share of time for which machines are on.

    Args:
        settings: Settings of the recipe.
        mean_up: Mean seconds until a machine fails; None for half of the run.
        mean_down: Mean seconds until it comes back; None for a hundredth of the run.
        detection_time: Seconds until others learn of a failure; None for 1/200 of the run.
        availability: Times for which spot machines were there (see `sim.traces.availability`),
            in place of exponential times.
        series: Beginning of the names of the series to use; all by default.
        hours: Hours of the traces for which the run stands.
        speeds: Speeds of the machines, which are repeated in turn.
        data_dir: Folder of the data sets; by default $EDGEGOSSIP_DATA.
    """

    def failing(environment: Environment, job: Job) -> Environment:
        number, seed = settings.num_workers, settings.seed
        noticed = job.seconds / 200 if detection_time is None else detection_time
        if availability is not None:
            spans = spot_times(
                availability, number, job.seconds, series=series, hours=hours, seed=seed
            )
            faults = Faults.available(spans, detection_time=noticed)
            return replace(environment, faults=faults)
        faults = Faults.churn(
            num_workers=number,
            horizon=job.seconds,
            mean_up=job.seconds / 2 if mean_up is None else mean_up,
            mean_down=job.seconds / 100 if mean_down is None else mean_down,
            seed=seed,
            detection_time=noticed,
        )
        return replace(environment, faults=faults)

    return compare_in(uneven(settings.num_workers, 1.0, speeds), failing, settings, data_dir)


def phones(
    settings: EnvironmentSettings = PHONES,
    *,
    data_dir: Path = default_data_dir(),
    phone_trace: Path | None = None,
) -> Comparison:
    """Phones of measured speeds, each with the data of one person: 21 people of UCI HAR.

    Links have 30 ms and 20 Mbit/s.

    Args:
        settings: Settings of the recipe; at most 21 workers with the task `har`.
        data_dir: Folder of the data sets; by default $EDGEGOSSIP_DATA.
        phone_trace: AI-Benchmark scores of phones (see `sim.traces.phones`); by default
            raw_ai_benchmark_list.json.gz in `data_dir`.
    """
    drawn = CommonSettings(num_workers=settings.num_workers, seed=settings.seed)
    platforms = phone_platforms(drawn, data_dir, phone_trace)
    fastest = max(each.throughput for each in platforms)
    relative = tuple(replace(each, throughput=each.throughput / fastest) for each in platforms)
    return compare_in(
        relative,
        lambda environment, job: replace(environment, link=PHONE_LINK),
        settings,
        data_dir,
    )


def one_slow(
    settings: EnvironmentSettings = ONE_SLOW,
    *,
    slow: float = 0.1,
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Equal machines and a slow one, of speeds 1, 1, 1 and 0.1; links of 100 Mbit/s.

    Args:
        settings: Settings of the recipe.
        slow: Speed of the last machine, in (0, 1].
        data_dir: Folder of the data sets; by default $EDGEGOSSIP_DATA.
    """
    check_range("slow", slow, "in (0, 1]")
    speeds = (*(1.0,) * (settings.num_workers - 1), slow)
    return compare_in(
        uneven(settings.num_workers, 1.0, speeds),
        lambda environment, job: environment,
        settings,
        data_dir,
    )


def own_machines(
    settings: EnvironmentSettings = OWN_MACHINES,
    *,
    speeds: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25),
    data_dir: Path = default_data_dir(),
) -> Comparison:
    """Uneven machines without a spare one, so the first one serves: for `edgegossip plan`.

    All systems have equally many machines: `alone`, which has one, and `halos`, which has
    servers of regions, are left out. Links have 5 ms and 100 Mbit/s. A plan has the machines
    and links of its own list instead.

    Args:
        settings: Settings of the recipe; at least 3 machines.
        speeds: Speeds of the machines, which are repeated in turn.
        data_dir: Folder of the data sets; by default $EDGEGOSSIP_DATA.
    """
    check_range("num_workers", settings.num_workers, "at least 3")
    return compare_in(
        uneven(settings.num_workers, 1.0, speeds),
        lambda environment, job: replace(environment, has_spare_server=False),
        settings,
        data_dir,
    )


def _relative(speeds: list[float]) -> tuple[Platform, ...]:
    """Platforms whose fastest has the throughput 1, named by the given speeds."""
    return tuple(
        Platform(name=f"{speed:g}x", throughput=speed / max(speeds)) for speed in speeds
    )
