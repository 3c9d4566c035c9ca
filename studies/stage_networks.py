"""Stages on links of many kinds: the method with the most samples per second on each.

Fields of a row:
    megabits, latency, in_flight: Bandwidth and latency of the links; batches in flight.
    pace: Samples per second.
    bytes: Bytes per sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from edgegossip.contract.protocol import Seconds
from edgegossip.recipes.staged_training import StageSettings, stage_run
from edgegossip.recipes.tasks import Settings
from edgegossip.runs.exhibits import Exhibits, Panel
from edgegossip.runs.study import Cell, Row, Session, Study
from studies.contest import Contest, StudySettings, contest_study
from studies.exhibits import Line, figure_and_tables, panel, table
from studies.stages import DIGITS, MNIST

UNEVEN = (1.0, 0.5, 0.5, 0.25)
MEGABITS: tuple[float, ...] = (1.0, 4.0, 20.0, 100.0, 1000.0)
LATENCIES: tuple[Seconds, ...] = (0.001, 0.01, 0.03, 0.1)
IN_FLIGHT = (4, 8, 16, 32)
WHOLE, NAIVE, PIPELINED, GREEDY = "whole", "naive", "pipelined", "greedy"
NUM_LOOKS = 20
STEADY = (0.3, 0.7)
"""Part of a run in which its pace is measured, after filling and before draining."""


@dataclass(frozen=True, kw_only=True)
class StageNetwork(Contest):
    """One model in stages on the same machines, joined by one kind of link.

    Args:
        stages: Machines and the links between them.
    """

    stages: StageSettings

    @property
    def megabits(self) -> float:
        """Bandwidth of each link and direction, in Mbit/s."""
        return self.stages.bandwidth * 8e-6

    def cells(self, data_dir: Path) -> Iterator[Cell]:
        folder = f"{self.group}/{self.megabits:g}-Mbit/{1000 * self.stages.latency:g}-ms"
        for name in (WHOLE, NAIVE, GREEDY):
            # `whole` and `naive` ignore the limit; for `greedy`, a high limit is best.
            work = partial(self._work, data_dir, name, IN_FLIGHT[-1])
            yield self.cell(f"{folder}/{name}", work)
        for in_flight in IN_FLIGHT:
            work = partial(self._work, data_dir, PIPELINED, in_flight)
            yield self.cell(f"{folder}/{PIPELINED}-{in_flight}", work)

    def _work(self, data_dir: Path, name: str, in_flight: int, session: Session) -> Row:
        settings = replace(self.stages, in_flight=in_flight, seed=self.seed)
        dataset = self.problem.load(data_dir)
        experiment = stage_run(name, dataset, self.problem.model, settings)
        experiment = replace(experiment, name=name, evaluation_epochs=1 / NUM_LOOKS)
        history = session.run(experiment).history
        first, last = (
            next(each for each in history if each.epochs >= min(share, history[-1].epochs))
            for share in STEADY
        )
        num_samples = last.samples_processed - first.samples_processed
        return {
            "group": self.group,
            "run": name,
            "in_flight": in_flight,
            "megabits": self.megabits,
            "latency": self.stages.latency,
            "pace": num_samples / (last.time - first.time),
            "bytes": last.bytes_sent / last.samples_processed,
        }


def links(settings: StudySettings = StudySettings()) -> Study:
    """Links of 1 to 1,000 Mbit/s, 1 to 100 ms: the method with the most samples per second.

    Data: MNIST. Duration: 15 minutes on one core.

    Args:
        settings: Settings of the study; only the first seed counts.
    """
    machines = StageSettings(
        num_epochs=1, width=0.5, speeds=UNEVEN, throughput=2000.0, precision="int8"
    )
    problem = replace(MNIST, num_train=8192, num_test=100, settings=Settings(num_epochs=1))
    megabits, latencies = MEGABITS, LATENCIES
    if settings.short:
        problem = replace(DIGITS, num_train=320, num_test=100)
        megabits, latencies = (1.0, 100.0), (0.001, 0.1)
        machines = StageSettings(
            num_epochs=1,
            width=0.1,
            num_stages=2,
            speeds=(1.0, 0.5),
            throughput=2000.0,
            batch_size=8,  # so that there are more batches than may be in flight
        )
    contests = [
        StageNetwork(
            problem=problem,
            seed=settings.seeds[0],
            stages=replace(machines, bandwidth=each * 125_000.0, latency=latency),
        )
        for each in megabits
        for latency in latencies
    ]
    return contest_study(
        "synthetic-gradients/links",
        "On which links do decoupled stages process more samples than a pipeline?",
        settings,
        contests,
        partial(_exhibits, megabits, latencies),
        printed=("No figure of links is known to us.",),
        scaled_down=(
            "One pass over 8,192 pictures: speeds are measured, not accuracies.",
            "Machines of speed 1, 0.5, 0.5 and 0.25, each holding one of four stages; "
            "activations and gradients travel in 8 bits.",
        ),
        stages=asdict(machines),
        in_flight=IN_FLIGHT,
    )


def _exhibits(
    megabits: Sequence[float], latencies: Sequence[Seconds], rows: Mapping[str, Row]
) -> Exhibits:
    best = _best(rows)
    places = [(each, latency) for each in megabits for latency in latencies]
    known = [place for place in places if (*place, WHOLE) in best]

    def ratio(place: tuple[float, Seconds], run: str, base: str) -> float | None:
        mine, other = best.get((*place, run)), best.get((*place, base))
        return None if mine is None or other is None else mine["pace"] / other["pace"]

    def ratios(run: str, base: str) -> Panel:
        rungs = {
            f"{latency:g}": (megabits, [ratio((each, latency), run, base) for each in megabits])
            for latency in latencies
        }
        return panel(
            f"{run} over {base}",
            rungs,
            kind="map",
            x_label="Mbit/s",
            y_label="latency in seconds",
            y_unit="times",
        )

    pairs = ((GREEDY, PIPELINED), (GREEDY, WHOLE), (PIPELINED, WHOLE))
    return figure_and_tables(
        "links",
        "Samples per second, relative to another method",
        "Pipelined: the best of 4 to 32 batches in flight. Whole: all of the model on the "
        "fastest machine, without links.",
        (ratios(*pair) for pair in pairs if known),
        table(
            "Samples a second",
            (_line(place, best) for place in known),
            "Measured between three and seven tenths of a run. In flight: number of batches "
            "with which the pipeline is fastest; its gradients are as many batches late, an "
            "effect not shown here.",
        ),
    )


def _best(rows: Mapping[str, Row]) -> dict[tuple[float, Seconds, str], Row]:
    """Find the fastest run of each method on each link."""
    best: dict[tuple[float, Seconds, str], Row] = {}
    for row in rows.values():
        key = row["megabits"], row["latency"], row["run"]
        if key not in best or row["pace"] > best[key]["pace"]:
            best[key] = row
    return best


def _line(place: tuple[float, Seconds], best: Mapping[tuple[float, Seconds, str], Row]) -> Line:
    runs = (WHOLE, NAIVE, PIPELINED, GREEDY)
    found = {run: best[*place, run] for run in runs if (*place, run) in best}
    piped = found.get(PIPELINED)
    return {
        "Mbit/s": ("text", f"{place[0]:g}"),
        "latency": ("seconds", place[1]),
        **{run: ("number", found[run]["pace"] if run in found else None) for run in runs},
        "in flight": ("number", None if piped is None else piped["in_flight"]),
        "most": ("text", max(found, key=lambda run: found[run]["pace"])),
    }
