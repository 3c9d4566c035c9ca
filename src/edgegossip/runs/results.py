"""Results of a run, and how a notebook shows them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from edgegossip.contract.errors import TrainingError, require_extra
from edgegossip.contract.metrics import ACCURACY, MetricSpec
from edgegossip.contract.protocol import Seconds
from edgegossip.machine.energy import Energy
from edgegossip.machine.goodput import NodeUse
from edgegossip.runs.best import BestModel
from edgegossip.runs.files import is_number

ALL_CRASHED = "all crashed"
"""The reason if all workers have crashed for good, and none finished before."""
EARLY_STOP = "early stop"
"""The reason if the averaged model has not improved for so long; see `KeepBest`."""
ENDS = ("finished", "time limit", "target", EARLY_STOP, ALL_CRASHED)
"""Reasons why a run ends by itself."""


_JOULES = {"busy": "busy_joules", "idle": "idle_joules", "links": "link_joules"}
"""Fields of a line, by the attributes of `Energy`."""


def joules_fields(energy: Energy | None) -> dict[str, float]:
    """The joules of a run as fields of a file; empty if unknown."""
    if energy is None:
        return {}
    causes = {field: getattr(energy, cause) for cause, field in _JOULES.items()}
    return {"joules": energy.total, **causes}


def use_fields(use: NodeUse | None) -> dict[str, float]:
    """The use of a run's machines as fields of a file; empty if unknown."""
    return {} if use is None else asdict(use)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The averaged model at one moment of a run.

    Attributes:
        time: Seconds since the run began.
        epochs: Samples processed by all workers / training samples.
        metrics: The task's metrics on the test split by name, the chosen one first.
        loss: Mean loss on the test split.
        consensus_distance: Root mean square distance of the workers from their mean.
        bytes_sent: Bytes sent by all workers so far.
        samples_processed: Samples processed by all workers so far.
        validation_value: The metric of `KeepBest` on the validation split; None without it.
        energy: Energy of all machines and links so far, by the model of the platforms and
            links; None if unknown.
        use: Goodput, share of compute used, and node-seconds so far; None if unknown.
    """

    time: Seconds
    epochs: float
    metrics: Mapping[str, float]
    loss: float
    consensus_distance: float
    bytes_sent: int
    samples_processed: int
    validation_value: float | None = None
    energy: Energy | None = None
    use: NodeUse | None = None

    def line(self) -> dict[str, float]:
        """The fields of an "evaluated" line of the log, with a field for each metric."""
        metrics = {MetricSpec(name=name).key: value for name, value in self.metrics.items()}
        before = {"time": self.time, "epochs": self.epochs}
        after = ("loss", "consensus_distance", "bytes_sent", "samples_processed")
        rest = {name: getattr(self, name) for name in after}
        line = before | metrics | rest | joules_fields(self.energy) | use_fields(self.use)
        if self.validation_value is not None:
            line["validation_value"] = self.validation_value
        return line

    @classmethod
    def from_line(cls, line: Mapping[str, Any], metrics: Sequence[MetricSpec]) -> Evaluation:
        """Read the fields of an "evaluated" line; null, which stands for NaN, becomes NaN.

        Args:
            line: The line.
            metrics: Metrics of the run, the chosen one first.

        Raises:
            LookupError: If a field is missing.
            TypeError: If a field is not a number.
        """

        def number(name: str) -> Any:  # noqa: ANN401 - an integer for counts
            value = math.nan if line[name] is None else line[name]
            if not is_number(value):
                raise TypeError(f"{name} is {value!r}, not a number")
            return value

        left_out = ["metrics", "energy", "use"]
        if "validation_value" not in line:
            left_out.append("validation_value")
        names = [name for name in cls.__dataclass_fields__ if name not in left_out]
        read = {each.name: number(each.key) for each in metrics}
        energy = None
        if "joules" in line:  # absent from logs of versions without energy
            energy = Energy(
                **{cause: number(field) for cause, field in _JOULES.items()},
            )
        use = None
        if "goodput" in line:  # absent from logs of versions without it
            use = NodeUse(**{field: number(field) for field in NodeUse.__dataclass_fields__})
        rest = {name: number(name) for name in names}
        return cls(metrics=read, energy=energy, use=use, **rest)

    @property
    def joules(self) -> float | None:
        """Joules of all machines and links so far; None if unknown."""
        return None if self.energy is None else self.energy.total

    @property
    def value(self) -> float:
        """The chosen metric."""
        return next(iter(self.metrics.values()))

    @property
    def accuracy(self) -> float:
        """Accuracy, in [0, 1].

        Raises:
            AttributeError: If the task's metrics do not include accuracy.
        """
        if ACCURACY.name not in self.metrics:
            raise AttributeError(
                f"this task measures no accuracy, only {', '.join(self.metrics)}; read `value` "
                "or `metrics`"
            )
        return self.metrics[ACCURACY.name]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Results:
    """Results of a run.

    Attributes:
        name: Name of the run.
        reason: Reason for the end: one of `ENDS`, "interrupted" or "failed".
        metric: The task's chosen metric.
        history: Evaluations of the averaged model, in order of time.
        worker_values: The chosen metric of each evaluated worker at the end, or of at most 64.
        params: The averaged model's tensors by name, as in its `state_dict`.
        virtual_seconds: Virtual time of the end.
        wall_seconds: Duration in seconds, including parts before an interruption; for workers,
            only the last part.
        mean_staleness: Mean staleness of received messages, in rounds.
        folder: Folder of the run.
        best: The best averaged model by validation; None without `Experiment.keep`.
        disagreements: Sentences about workers of a real run that ended with other models than
            the rest; empty if all agree.
    """

    name: str
    reason: str
    metric: MetricSpec = ACCURACY
    history: list[Evaluation]
    worker_values: list[float]
    params: dict[str, Tensor]
    virtual_seconds: Seconds
    wall_seconds: float
    mean_staleness: float
    folder: Path | None
    disagreements: tuple[str, ...] = ()
    best: BestModel | None = None

    def __repr__(self) -> str:
        """The end of the run, without the history and the tensors."""
        last = f", {self.metric.name}={self.final_value:.4g}" if self.history else ""
        folder = None if self.folder is None else str(self.folder)
        return (
            f"Results({self.name!r}, {self.reason!r}{last}, "
            f"virtual_seconds={self.virtual_seconds:.4g}, folder={folder!r})"
        )

    @property
    def final_value(self) -> float:
        """The chosen metric of the averaged model at the end."""
        return self.history[-1].value

    @property
    def best_value(self) -> float:
        """The best value of the chosen metric of the averaged model."""
        return self.metric.best(evaluation.value for evaluation in self.history)

    @property
    def final_accuracy(self) -> float:
        """Accuracy of the averaged model at the end; see `Evaluation.accuracy`."""
        return self.history[-1].accuracy

    @property
    def worker_accuracies(self) -> list[float]:
        """Accuracy of each evaluated worker at the end.

        Raises:
            AttributeError: If the chosen metric is not accuracy.
        """
        if self.metric.name != ACCURACY.name:
            raise AttributeError(
                f"workers are measured by {self.metric.name}, not by accuracy; read "
                "`worker_values`"
            )
        return self.worker_values

    @property
    def best_accuracy(self) -> float:
        """Best accuracy of the averaged model; see `Evaluation.accuracy`."""
        return max(evaluation.accuracy for evaluation in self.history)

    def frame(self) -> Any:  # noqa: ANN401 - pandas is an extra
        """The history as a `pandas.DataFrame`, with a row for each evaluation.

        Columns are `time`, `epochs`, each metric by its key, `loss`, `consensus_distance`,
        `bytes_sent`, `samples_processed`, if known `joules`, `busy_joules`, `idle_joules` and
        `link_joules`, `goodput`, `compute_used` and `node_seconds`, as in `events.jsonl`, and
        `validation_value` with `Experiment.keep`.

        Raises:
            UsageError: If pandas is missing.
        """
        require_extra("Results.frame", "pandas")
        import pandas

        return pandas.DataFrame([evaluation.line() for evaluation in self.history])

    def _repr_html_(self) -> str:
        """For notebooks: the report, if it has been drawn, or else the last numbers."""
        if self.folder is not None and (page := framed(self.folder / "report.html")):
            return page
        rows = {
            name: f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            for name, value in self.history[-1].line().items()
        }
        hint = f"edgegossip.Report({str(self.folder)!r}) draws the report."
        return table(
            f"{self.name}, {self.reason}", rows, hint if self.folder is not None else ""
        )

    def time_to(self, target: float) -> Seconds | None:
        """Virtual seconds until the averaged model first reached `target`; None if never."""
        return None if (first := self._first_at(target)) is None else first.time

    def joules_to(self, target: float) -> float | None:
        """Joules until the averaged model first reached `target`; None if never or unknown."""
        return None if (first := self._first_at(target)) is None else first.joules

    def node_seconds_to(self, target: float) -> Seconds | None:
        """Node-seconds until the averaged model first reached `target`; None if never or
        unknown.
        """
        first = self._first_at(target)
        return None if first is None or first.use is None else first.use.node_seconds

    def _first_at(self, target: float) -> Evaluation | None:
        reached = (e for e in self.history if self.metric.is_reached(e.value, target))
        return next(reached, None)

    def summary(
        self, target: float | None = None, baseline: Results | None = None
    ) -> dict[str, Any]:
        """The entry of this run in `summary.json`.

        The file of a single run also has `name`, `reason`, `error` and `worker_accuracies`: the
        final accuracies of the workers' own models, or of at most 64 evenly spaced ones. With
        another chosen metric, this list is called `worker_values`, and the metric's key
        replaces `accuracy` in the names of fields, e.g. `final_mae` and `worker_mae_max`. If
        workers of a real run ended with different models, `disagreements` says so.

        Fields:
            metric: Name of the chosen metric; absent if it is accuracy.
            final_accuracy, best_accuracy: Last and best evaluation of the averaged model;
                further metrics have `final_` only. Chosen on the test split, the best one is
                no estimate for new data.
            kept_accuracy: Test accuracy of the best model by validation; so for all metrics.
                This field and the next four are absent without `Experiment.keep`.
            kept_by, kept_validation_value: Metric by which that model was chosen, and its value
                on the validation split.
            kept_time, kept_round: Time at which that model was measured, and rounds that all
                evaluated workers had completed then.
            worker_accuracy_min, worker_accuracy_mean: Worst and mean of `worker_accuracies`.
            time_to_target: Time of the first evaluation at the target; null if there is none,
                and in the file of a single run.
            speedup: The baseline's time to the target / this run's; null if either is missing.
            virtual_seconds: Time of the end.
            wall_seconds: Duration, including parts before an interruption.
            bytes_sent, samples_processed, consensus_distance: At the last evaluation.
            joules, busy_joules, idle_joules, link_joules: At the last evaluation; see
                `edgegossip.machine.energy.Energy`. Absent if unknown.
            joules_to_target: Joules until the first evaluation at the target; absent if unknown
                or not reached, and in the file of a single run.
            goodput, compute_used, node_seconds: At the last evaluation; see
                `edgegossip.machine.goodput.NodeUse`. Absent if unknown.
            node_seconds_to_target: Node-seconds until the first evaluation at the target;
                absent if unknown or not reached, and in the file of a single run.
            mean_staleness: Mean over received messages of the receiver's round minus the
                message's, at least 0. If workers count rounds at different speeds (GoSGD), it
                mostly measures this difference.
        """
        last, key = self.history[-1], self.metric.key
        time = reference = None
        until: dict[str, float | None] = {}
        if target is not None:
            time = self.time_to(target)
            until["joules_to_target"] = self.joules_to(target)
            until["node_seconds_to_target"] = self.node_seconds_to(target)
            reference = baseline.time_to(target) if baseline else None
        others = [*last.metrics.items()][1:]
        return {
            **({} if self.metric.name == ACCURACY.name else {"metric": self.metric.name}),
            f"final_{key}": self.final_value,
            f"best_{key}": self.best_value,
            **{f"final_{MetricSpec(name=name).key}": value for name, value in others},
            **({} if self.best is None else self.best.summary()),
            # The worst value, named after its end of the range.
            f"worker_{key}_{'min' if self.metric.higher_is_better else 'max'}": (
                self.metric.worst(self.worker_values)
            ),
            f"worker_{key}_mean": sum(self.worker_values) / len(self.worker_values),
            "time_to_target": time,
            "speedup": reference / time if reference is not None and time else None,
            "virtual_seconds": self.virtual_seconds,
            "wall_seconds": self.wall_seconds,
            "bytes_sent": last.bytes_sent,
            "samples_processed": last.samples_processed,
            "consensus_distance": last.consensus_distance,
            "mean_staleness": self.mean_staleness,
            **joules_fields(last.energy),
            **use_fields(last.use),
            **{name: amount for name, amount in until.items() if amount is not None},
        }


# Notebooks.


_MAX_BYTES = 8 * 2**20
"""Maximum bytes of a page to embed in a notebook, which keeps a copy with each output."""


def framed(page: Path, height: int = 640) -> str | None:
    """A page as a frame for a notebook; None if the page cannot be read.

    The frame contains the whole page, so a copy of the notebook still shows it. It has its own
    styles and runs no scripts. A page that is too large becomes a link.

    Args:
        page: An HTML file that loads nothing from elsewhere.
        height: Height of the frame in pixels.
    """
    try:
        if page.stat().st_size > _MAX_BYTES:
            link = escape(page.resolve().as_uri(), quote=True)
            return f'<p>The report is large: <a href="{link}">{escape(str(page))}</a></p>'
        content = page.read_text(encoding="utf-8")
    except OSError:
        return None
    return (
        f'<iframe srcdoc="{escape(content, quote=True)}" sandbox="" loading="lazy" '
        f'style="box-sizing: border-box; width: 100%; height: {height}px; '
        f'border: 1px solid #8884"></iframe>'
    )


def table(title: str, rows: Mapping[str, str], note: str) -> str:
    """A small table for a notebook.

    >>> table("a", {"loss": "0.5"}, "b")
    '<table><caption>a</caption><tr><th>loss</th><td>0.5</td></tr></table><p>b</p>'
    """
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{lines}</table><p>{escape(note)}</p>"


# Warnings.


_LOG = logging.getLogger("edgegossip.runs")


class FiniteMetrics:
    """Reports the first metric that is not finite although the loss is.

    If the loss is not finite either, the model has diverged, and the metric is not at fault.

    >>> FiniteMetrics().check(0.5, {"R2": 0.1})
    """

    def __init__(self) -> None:
        self._has_complained = False

    def check(
        self, loss: float, metrics: Mapping[str, float], *, is_fatal: bool = False
    ) -> None:
        """Warn about the first metric that is not finite.

        Args:
            loss: Mean loss of the evaluation.
            metrics: Its metrics by name.
            is_fatal: Raise an error instead of a warning; for evaluations before any training.

        Raises:
            TrainingError: If `is_fatal`, and a metric is not finite although the loss is.
        """
        wrong = [name for name, value in metrics.items() if not math.isfinite(value)]
        if not wrong or self._has_complained or not math.isfinite(loss):
            return
        self._has_complained = True
        complaint = (
            f"metric {wrong[0]!r} is {metrics[wrong[0]]} on the test split, where the loss is "
            f"{loss:.4g}; a metric must be finite (R2 is not if all targets are equal), so "
            "look at the test data, or give the task other metrics"
        )
        if is_fatal:
            raise TrainingError(complaint)
        _LOG.warning("%s", complaint)
