"""Cloud and edge: what it costs that phones do not wait for the cloud's gradients.

Rows have the fields of `studies.stages`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from edgegossip.models.chains import eight_layers
from edgegossip.recipes.baselines import phone_platforms
from edgegossip.recipes.cloud_edge import ALONE, AT, DEFAULTS, METHODS, cloud_run
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.experiment import Experiment
from edgegossip.runs.study import Study
from edgegossip.sim.platform import Platform
from studies.contest import Attempt, StudySettings, contest_study
from studies.problems import HAR_BY_SUBJECT
from studies.stages import DIGITS, TEACHER_RATE, TaughtContest, stage_exhibits

PHONES = ALONE[0]
WITH_MOMENTUM = "synthetic-gradients, momentum"
"""Synthetic gradients with the momentum of the other runs, which they leave out by default."""
RATES = (0.01, 0.003, 0.03, 0.001, 0.1)
"""Candidate learning rates of each method."""
NOTE = (
    "Medians over the seeds; equally many samples for all, virtual time. Accuracy is the mean "
    "of the last five evaluations on test data of other people. The learning rate is the best "
    "of those tried, on held-out data with another seed. `epoch-gossip` and `edge-squeeze` "
    "train whole models on the phones alone."
)


@dataclass(frozen=True, kw_only=True)
class CloudContest(TaughtContest):
    """Phones with data of their own and a cloud; see `recipes.cloud_edge`.

    Args:
        at: The first block of the cloud's stage.
        precision: Precision of activations and gradients in transit.
        trace: Whether phones have the speeds of a trace, and not all the same.
    """

    at: tuple[int, ...] = AT
    precision: str = "int8"
    trace: bool = True

    def experiment(self, data_dir: Path, attempt: Attempt, num_epochs: int) -> Experiment:
        problem = self.problem_of(attempt)
        own = replace(problem.settings, num_epochs=num_epochs, seed=attempt.seed)
        machines = (Platform(throughput=own.throughput),) * own.num_workers
        if self.trace:
            machines = phone_platforms(own, data_dir, None)
        is_control = attempt.run == WITH_MOMENTUM
        return cloud_run(
            "synthetic-gradients" if is_control else attempt.run,
            replace(problem, settings=own).task(data_dir),
            machines,
            own,
            self.precision,
            attempt.settings["teacher_lr"],
            self.at,
            keeps_momentum=is_control,
        )

    def plain(self) -> dict[str, object]:
        return {"at": self.at, "precision": self.precision, **super().plain()}


def phones(settings: StudySettings = StudySettings(seeds=(0, 1, 2, 3, 4))) -> Study:
    """Phones hold a model's first stage, a cloud the second: accuracy, time, bytes.

    Data: UCI HAR, and the scores of phones. Duration: a minute per run.

    Args:
        settings: Settings of the study.
    """
    names: tuple[str, ...] = (*ALONE, *METHODS, WITH_MOMENTUM, "splitfed")
    own = Settings(**asdict(DEFAULTS))
    problem, at = replace(HAR_BY_SUBJECT, settings=own), AT
    if settings.short:
        names, at = (PHONES, "synthetic-gradients"), (4,)
        model = partial(eight_layers, width=0.1)
        problem = replace(DIGITS, model=model, settings=Settings(num_epochs=1, num_workers=2))
    contest = CloudContest(
        problem=problem,
        methods=names,
        seeds=settings.seeds,
        rates={name: [(lr, TEACHER_RATE) for lr in RATES] for name in names},
        at=at,
        trace=not settings.short,
    )
    return contest_study(
        "synthetic-gradients/phones",
        "What does it cost that phones do not wait for the gradients of a cloud?",
        settings,
        [contest],
        partial(stage_exhibits, "phones", "", whole=PHONES, note=NOTE),
        printed=(
            "No figure: the title of Chen et al. (HotEdge 2019) names cloud and edge, but only "
            "the abstract is known to us.",
        ),
        contest=contest.plain(),
    )
