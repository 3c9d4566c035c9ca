"""Parameter servers' time to a given loss, by method, speeds, delay, links and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from edgegossip.models import lrn_cnn
from edgegossip.recipes import problems
from edgegossip.recipes.problems import Problem
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.exhibits import Exhibits, Figure
from edgegossip.runs.scoreboard import bars, score_table
from edgegossip.runs.study import Row, Study
from edgegossip.runs.tuning import TUNING_SEED
from edgegossip.sim.platform import ThrottlingTrace
from studies.contest import StudySettings, Tried, contest_study
from studies.exhibits import figure_and_tables
from studies.problems import MNIST_MLP, SMALL_MLP
from studies.servers import (
    OPTIONS,
    TIME,
    Cluster,
    Goal,
    ServerContest,
    Tuning,
    converged_scores,
    loss_curves,
    machines,
    server_scores,
    tuning_exhibits,
)

NUM_WORKERS = 18
HETEROGENEITY = 2.0
HETEROGENEITIES = (1.45, 2.0, 2.6, 3.2)
DELAYS = (0.0, 2.0, 5.0, 10.0)
UNEVEN = ("bsp", "ssp", "fixed-adacomm", "adsp-plus", "adsp")
"""The methods whose time is measured at several H."""

DEFAULTS = StudySettings(seeds=(0, 1, 2, 3, 4))

PRINTED = (
    "The abstract claims that ADSP outperforms existing models significantly in convergence "
    "time, scalability and adaptability to large heterogeneity, without a figure. We have not "
    "read the paper's figures, so none is quoted.",
    "The published code draws H, the workers' mean speed divided by the lowest, of 1.45 to "
    "3.2; its SSP has a slack of 40 steps, and its Fixed ADACOMM tau = 40.",
    "Its plots of CIFAR-10 have a threshold of 1.1 for SSP, BSP and ADACOMM, and of 0.94 for "
    "ADSP and Fixed ADACOMM, so that its bars are not times to one loss.",
)
SCALED_DOWN = (
    "LeNet-5 (62,006 parameters) replaces the paper's network, except in `cifar10-lrn-cnn`, "
    "and batches of 32 its 128; a step takes the fastest worker half a second, about as in the "
    "paper.",
    "Platforms and links are simulated: speeds are evenly spread, and all machines, including "
    "the server, have 100 Mbit/s and 5 ms.",
)


SETTINGS = Settings(batch_size=32, throughput=64.0, momentum=0.0)
CIFAR10_LENET5 = replace(
    problems.CIFAR10_LENET5,
    num_test=1_000,
    settings=SETTINGS,
    scaled_down="CIFAR-10 is tested on 1,000 of the 10,000 pictures, because evaluations are "
    "frequent.",
)
CIFAR10_LRN_CNN = replace(
    problems.CIFAR10_LENET5,
    name="cifar10-lrn-cnn",
    model=lrn_cnn,
    num_test=500,
    settings=replace(SETTINGS, weight_decay=0.004),
    scaled_down="The paper's network is tested on 500 of the 10,000 pictures, and trained "
    "without the distortions of TensorFlow's tutorial.",
)
HAR_CNN = replace(
    problems.HAR_CNN,
    num_test=1_000,
    settings=SETTINGS,
    scaled_down="HAR is tested on 1,000 of the 2,947 windows.",
)
MNIST_FAR = replace(
    MNIST_MLP,
    name="mnist-mlp-far",
    settings=replace(MNIST_MLP.settings, throughput=64.0),
    scaled_down="For delays, MNIST and a perceptron with a low target loss: relative to a "
    "delay, a run should last as long as in the paper, and the paper's window of 60 s is kept.",
)

GOALS = {
    "cifar10-lenet5": Goal(
        loss=1.7, look_seconds=2.5, max_seconds=3000.0, validation_share=0.03
    ),
    "har-cnn": Goal(loss=0.5, look_seconds=1.0, max_seconds=1000.0, validation_share=0.1),
    "cifar10-lrn-cnn": Goal(
        loss=1.7, look_seconds=5.0, max_seconds=1000.0, validation_share=0.01
    ),
    MNIST_FAR.name: Goal(
        loss=0.1, look_seconds=10.0, max_seconds=60_000.0, validation_share=0.02
    ),
    SMALL_MLP.name: Goal(loss=2.2, look_seconds=1.0, max_seconds=20.0, validation_share=0.2),
}
TUNING = {
    # Trials of all methods are shortened equally.
    "cifar10-lenet5": {"loss": 1.8, "max_seconds": 600.0},
    "har-cnn": {"max_seconds": 400.0},
    "cifar10-lrn-cnn": {"loss": 1.95, "max_seconds": 300.0},
    SMALL_MLP.name: {},
}
"""Differences between the goals of tuning runs and `GOALS`."""
PROBLEMS = (CIFAR10_LENET5, HAR_CNN)
WITH_PAPERS = (*PROBLEMS, CIFAR10_LRN_CNN)
CONVERGENCE = {
    "cifar10-lenet5": {"look_seconds": 15.0, "max_seconds": 3000.0},
    "har-cnn": {"look_seconds": 3.0, "max_seconds": 600.0},
    "cifar10-lrn-cnn": {"look_seconds": 10.0, "max_seconds": 1000.0},
    SMALL_MLP.name: {},
}
"""Differences between the goals of runs to convergence and `GOALS`."""
NEVER = 1e-6
"""A loss that no run reaches."""

CHOSEN: dict[tuple[str, str], Mapping[str, tuple[float, float | None]]] = {
    ("cifar10-lenet5", "H = 2"): {
        "bsp": (0.15, None),
        "bsp, batches tuned": (0.15, None),
        "ssp": (0.15, 160),
        "asp": (0.15, None),
        "fixed-adacomm": (0.15, 5),
        "fixed-adacomm, batches tuned": (0.15, 5),
        # The value of HAR: it was not tuned here.
        "fixed-adacomm, shares balanced": (0.15, 20),
        "adacomm": (0.15, 80),
        "adsp-plus": (0.15, 12),
        "adsp": (0.15, 10),
        "adsp, as published": (0.15, 5),
    },
    ("har-cnn", "H = 2"): {
        "bsp": (0.45, None),
        "bsp, batches tuned": (0.15, None),
        "ssp": (0.45, 40),
        "asp": (0.45, None),
        "fixed-adacomm": (0.15, 5),
        "fixed-adacomm, batches tuned": (0.15, 5),
        "fixed-adacomm, shares balanced": (0.15, 20),
        "adacomm": (0.45, 20),
        "adsp-plus": (0.45, 12),
        "adsp": (0.45, 5),
        "adsp, as published": (0.45, 5),
    },
    # The values of LeNet-5: `adsp/time-to-loss` has its own search for this network.
    ("cifar10-lrn-cnn", "H = 2"): {
        "bsp": (0.15, None),
        "ssp": (0.15, 160),
        "asp": (0.15, None),
        "fixed-adacomm": (0.15, 5),
        "adsp-plus": (0.15, 12),
        "adsp": (0.15, 10),
    },
    (MNIST_FAR.name, "H = 2"): {
        "bsp": (0.15, None),
        "ssp": (0.45, 40),
        "fixed-adacomm": (0.15, 20),
        "adsp": (0.15, 60),
    },
    (SMALL_MLP.name, "H = 2"): {
        name: (0.1, None if option is None else 2) for name, option in OPTIONS.items()
    },
}
"""Learning rate and own setting by problem and machines, and by method: the best in
`adsp/tuning`, if that has the problem.
"""

PERIODS, PERIOD_RATES = (1, 2, 3, 5), (0.26, 0.45, 0.78)
BETTER: Mapping[str, Mapping[str, Tried]] = {
    "har-cnn": {
        "bsp": {"lr": 0.26, "value": None},
        "fixed-adacomm": {"lr": 0.45, "value": 5},
        "fixed-adacomm, batches tuned": {"lr": 0.45, "value": 3},
        "fixed-adacomm, batches tuned at once": {"lr": 0.45, "value": 3},
        "fixed-adacomm, shares balanced": {"lr": 0.45, "value": 3},
    },
}
"""What `adsp/time-to-loss` and `adsp/periods` found to be better than `CHOSEN`."""


def tuning(settings: StudySettings = StudySettings(seeds=(TUNING_SEED,))) -> Study:
    """Each method's best learning rate and own setting, on validation data.

    Grids have no end that a search reaches: it goes on until neither neighbor is better. All
    methods are tuned at H = 2; those of `adsp/heterogeneity`, at H = 3.2, too. Data: HAR and
    CIFAR-10. Duration: an hour each on one otherwise idle core.

    Args:
        settings: Settings of the study.
    """
    contests = [
        each
        for problem in _problems(settings, WITH_PAPERS)
        for seed in settings.seeds
        for each in _searches(problem, settings, seed)
    ]
    title = "With which settings is each method fastest?"
    return _study("tuning", title, settings, contests, tuning_exhibits)


def _searches(
    problem: Problem, settings: StudySettings, seed: int = TUNING_SEED
) -> list[Tuning]:
    """The searches on a problem, one for each H for which methods are tuned."""
    return [
        Tuning(
            problem=problem,
            seed=seed,
            machines=_machines(problem, settings, f"H = {each:g}", heterogeneity=each),
            goal=replace(GOALS[problem.name], **TUNING[problem.name]),
            methods=tuple(_methods(settings, methods)),
        )
        for each, methods in ((2.0, OPTIONS), (3.2, UNEVEN))
    ]


def time_to_loss(settings: StudySettings = DEFAULTS) -> Study:
    """All methods, each tuned, 18 workers: virtual time to a given loss on test data.

    Twelve parameter-server methods at H = 2, and five at H = 3.2, on HAR and CIFAR-10, after
    the searches of `adsp/tuning`. Duration: 90 minutes for `har-cnn` on one core, three hours
    for `cifar10-lenet5`, and a day for `cifar10-lrn-cnn`.

    Args:
        settings: Settings of the study.
    """
    contests = list[ServerContest | Tuning]()
    for problem in _problems(settings, WITH_PAPERS):
        for search in _searches(problem, settings):
            contests.append(search)
            contests += [
                ServerContest(
                    problem=problem,
                    seed=seed,
                    machines=search.machines,
                    goal=GOALS[problem.name],
                    choices=search,
                )
                for seed in settings.seeds
            ]
    title = "Which parameter server reaches a given loss soonest?"
    name = "time-to-loss"
    return _study(name, title, settings, contests, partial(_exhibits, name))


def periods(
    settings: StudySettings = DEFAULTS,
    *,
    heterogeneity: float = HETEROGENEITY,
    rates: tuple[float, ...] = PERIOD_RATES,
) -> Study:
    """Fixed ADACOMM on HAR with short periods, each with three learning rates.

    All workers have equal batches, or batches in proportion to their speeds. A period of 1 is
    BSP. The search of `adsp/time-to-loss` walks past periods that a single trial has not
    reached. Here, all have five seeds. Duration: half a minute per run on one core.

    Args:
        settings: Settings of the study.
        heterogeneity: H, the workers' mean speed divided by the lowest.
        rates: Learning rates to try with each period.
    """
    (problem,) = _problems(settings, (HAR_CNN,))
    contests = [
        ServerContest(
            problem=problem,
            seed=seed,
            machines=_machines(
                problem,
                settings,
                f"tau = {period}, rate {lr:g}",
                heterogeneity=heterogeneity,
            ),
            goal=GOALS[problem.name],
            choices={
                name: {"lr": lr, "value": period}
                for name in ("fixed-adacomm", "fixed-adacomm, batches tuned")
            },
        )
        for period in PERIODS
        for lr in rates
        for seed in settings.seeds
    ]
    title = "Which period is best for Fixed ADACOMM?"
    return _study("periods", title, settings, contests, partial(_exhibits, "periods"))


def heterogeneity(settings: StudySettings = DEFAULTS) -> Study:
    """Increasingly unequal speeds: H of 1.45, 2, 2.6 and 3.2.

    The other settings are as in `adsp/time-to-loss`. Duration: half a minute per run on one
    core.

    Args:
        settings: Settings of the study.
    """
    return _varied(
        "heterogeneity",
        "How much do unequal speeds cost?",
        settings,
        lambda problem: [
            _machines(problem, settings, f"H = {each:g}", heterogeneity=each)
            for each in HETEROGENEITIES
        ],
        UNEVEN,
    )


def convergence(settings: StudySettings = DEFAULTS) -> Study:
    """Equally long runs that go on where the loss no longer falls, 18 workers, H = 2.

    Learning rates and the methods' own settings are fixed beforehand; all else is as in
    `adsp/time-to-loss`. Duration of a run on one core: two minutes for `har-cnn`, ten for
    `cifar10-lenet5`, and an hour for `cifar10-lrn-cnn`.

    Args:
        settings: Settings of the study.
    """
    contests = [
        ServerContest(
            problem=problem,
            seed=seed,
            machines=_machines(problem, settings),
            goal=replace(GOALS[problem.name], loss=NEVER, **CONVERGENCE[problem.name]),
            choices=_best_choices(
                problem, _machines(problem, settings), settings, (*UNEVEN, "asp")
            ),
        )
        for problem in _problems(settings, WITH_PAPERS)
        for seed in settings.seeds
    ]
    title = "Where do parameter servers end?"
    return _study("convergence", title, settings, contests, _converged)


def delay(settings: StudySettings = DEFAULTS) -> Study:
    """Each message takes 0, 2, 5 or 10 seconds longer.

    The other settings are as in `adsp/time-to-loss`. Duration: half a minute per run on one
    core.

    Args:
        settings: Settings of the study.
    """
    return _varied(
        "delay",
        "How much does a slow network cost?",
        settings,
        lambda problem: [
            _machines(problem, settings, f"{each:g} s", delay=each) for each in DELAYS
        ],
        ["bsp", "ssp", "fixed-adacomm", "adsp"],
        problems=(MNIST_FAR, *PROBLEMS),
    )


def bandwidth(settings: StudySettings = DEFAULTS) -> Study:
    """Links of 100, 30 and 10 Mbit/s: their use, and the cost of slow ones.

    The other settings are as in `adsp/time-to-loss`. Duration: half a minute per run on one
    core.

    Args:
        settings: Settings of the study.
    """
    return _varied(
        "bandwidth",
        "How much of the links is used, and how much do slow links cost?",
        settings,
        lambda problem: [
            _machines(problem, settings, f"{each:g} Mbit/s", bandwidth=each * 1e6 / 8)
            for each in (100, 30, 10)
        ],
        ["bsp", "ssp", "fixed-adacomm", "adacomm", "adsp"],
    )


def workers(settings: StudySettings = DEFAULTS) -> Study:
    """Twice as many workers: 18 and 36.

    The other settings are as in `adsp/time-to-loss`. Duration: half a minute per run on one
    core.

    Args:
        settings: Settings of the study.
    """
    return _varied(
        "workers",
        "How much do twice as many workers gain?",
        settings,
        lambda problem: [
            _machines(problem, settings, f"{each} workers", num_workers=each)
            for each in ((2, 4) if settings.short else (NUM_WORKERS, 2 * NUM_WORKERS))
        ],
        ["bsp", "ssp", "fixed-adacomm", "adsp"],
    )


def nonstationary(settings: StudySettings = DEFAULTS) -> Study:
    """Speeds that change during the run: a third of the workers become four times slower.

    The last third of the ranks, which are the fastest, slows down. The other settings are as in
    `adsp/time-to-loss`. Duration: half a minute per run on one core.

    Args:
        settings: Settings of the study.
    """
    return _varied(
        "nonstationary",
        "How much do changing speeds cost?",
        settings,
        lambda problem: [
            _machines(problem, settings, "steady"),
            _throttled(problem, _machines(problem, settings, "a third slows down")),
        ],
        [*UNEVEN, "fixed-adacomm, batches tuned", "asp"],
        choose=_best_choices,
    )


SLOW_DOWN_AT = {"cifar10-lenet5": 60.0, "har-cnn": 20.0, SMALL_MLP.name: 2.0}
SLOW_DOWN = 4.0


def _throttled(problem: Problem, machines: Cluster) -> Cluster:
    """Slow down the last third of the workers early in the run."""
    trace = ThrottlingTrace((0.0, SLOW_DOWN_AT[problem.name]), (1.0, SLOW_DOWN))
    num_slow = machines.num_workers // 3
    steady, slow = machines.platforms[:-num_slow], machines.platforms[-num_slow:]
    platforms = (*steady, *(replace(each, throttling=trace) for each in slow))
    return replace(machines, platforms=platforms)


def _problems(
    settings: StudySettings, problems: Sequence[Problem] = PROBLEMS
) -> Sequence[Problem]:
    return (SMALL_MLP,) if settings.short else problems


def _methods(settings: StudySettings, names: Iterable[str] = OPTIONS) -> list[str]:
    return [name for name in names if not settings.short or name in ("bsp", "adsp")]


def _machines(
    problem: Problem,
    settings: StudySettings,
    name: str = f"H = {HETEROGENEITY:g}",
    **changes: Any,  # noqa: ANN401
) -> Cluster:
    num_workers = 3 if settings.short else NUM_WORKERS
    defaults = {"num_workers": num_workers, "heterogeneity": HETEROGENEITY}
    return machines(name, problem, **{**defaults, **changes})


def _choices(
    problem: Problem, machines: Cluster, settings: StudySettings, methods: Iterable[str]
) -> Mapping[str, Tried]:
    """The tuned settings; those of H = 2 on machines for which nothing was tuned."""
    chosen = CHOSEN.get((problem.name, machines.name)) or CHOSEN[problem.name, "H = 2"]
    return {
        run: dict(zip(("lr", "value"), chosen[run], strict=True))
        for run in _methods(settings, methods)
    }


def _best_choices(
    problem: Problem, machines: Cluster, settings: StudySettings, methods: Iterable[str]
) -> Mapping[str, Tried]:
    """The same with what other studies found to be better."""
    chosen = _choices(problem, machines, settings, methods)
    return {**chosen, **BETTER.get(problem.name, {})}


def _varied(
    name: str,
    title: str,
    settings: StudySettings,
    setups: Callable[[Problem], Sequence[Cluster]],
    methods: Sequence[str],
    problems: Sequence[Problem] = PROBLEMS,
    choose: Callable[..., Mapping[str, Tried]] = _choices,
) -> Study:
    contests = [
        ServerContest(
            problem=problem,
            seed=seed,
            machines=each,
            goal=GOALS[problem.name],
            choices=choose(problem, each, settings, methods),
        )
        for problem in _problems(settings, problems)
        for each in setups(problem)
        for seed in settings.seeds
    ]
    return _study(name, title, settings, contests, partial(_exhibits, name))


def _study(
    name: str,
    title: str,
    settings: StudySettings,
    contests: Sequence[ServerContest | Tuning],
    exhibit: Callable[[Sequence[Any], Mapping[str, Row]], Exhibits],
) -> Study:
    first = [each for each in contests if each.seed in (settings.seeds[0], TUNING_SEED)]
    return contest_study(
        f"adsp/{name}",
        title,
        settings,
        contests,
        partial(exhibit, first),
        printed=PRINTED,
        scaled_down=SCALED_DOWN,
        contests=[each.plain() for each in first],
    )


CONVERGED_NOTE = (
    "Medians over the seeds. Losses and accuracies are means of ten evaluations, because "
    "single ones are noisy. The learning rate of each method is constant, the best for its "
    "time to the loss of `adsp/time-to-loss`."
)


def _converged(contests: Sequence[ServerContest], rows: Mapping[str, Row]) -> Exhibits:
    curves = [
        loss_curves(rows.values(), each.group, each.machines.name, each.seed)
        for each in contests
    ]
    return figure_and_tables(
        "convergence",
        "Runs to convergence",
        f"Test loss, seed {contests[0].seed}.",
        [each for each in curves if each.series],
        score_table(converged_scores(rows.values()), heading="Ours", note=CONVERGED_NOTE),
    )


NOTE = (
    "Medians over the seeds; a dash means that the run never reached the target. A run ends "
    "when the mean of its last ten test losses reaches the target of its problem; all runs are "
    "measured equally often. 'ADSP takes less by' is 1 - ADSP's time / the run's time with the "
    "same seed; for runs that never reached the target, it is a lower bound. Settings are the "
    "best on validation data with another seed, from equally many candidates for each method."
)


def _exhibits(
    name: str, contests: Sequence[ServerContest | Tuning], rows: Mapping[str, Row]
) -> Exhibits:
    trials = {name: row for name, row in rows.items() if "trials" in row}
    found = server_scores(row for name, row in rows.items() if name not in trials)
    measured = [each for each in contests if isinstance(each, ServerContest)]
    figures = []
    for group in dict.fromkeys(each.group for each in found):
        mine = [each for each in found if each.group == group]
        curves = [
            loss_curves(rows.values(), group, each.machines.name, each.seed)
            for each in measured
            if each.group == group
        ]
        figures.append(
            Figure(
                name=f"{name}-{group}",
                heading=f"Time to one loss: {group}",
                caption="Bars: medians over the seeds; thin lines: their range; no bar: "
                f"most never reached it. Curves: test loss, seed {measured[0].seed}.",
                panels=(
                    bars(mine, TIME, y_label="virtual time to the loss"),
                    *(panel for panel in curves if panel.series),
                ),
            )
        )
    table = score_table(found, heading="Ours", note=NOTE, setting="machines")
    tables = (table,) if found else ()
    tried = tuning_exhibits(contests, trials).tables
    return Exhibits(figures=tuple(figures), tables=(*tables, *tried))
