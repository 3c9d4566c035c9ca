"""The queue: chooses cells that fit into the minutes at hand, runs them and keeps results.

Files in its folder:
    NAME.json: Result of a cell: its settings, origin (commit, versions, device) and row. If
        the run failed by itself, for example because it diverged, `row` is null and `error`
        says why. Fields measured with a clock begin with `wall_`.
    unfinished/NAME/: A run that was stopped, with its packed state.
    forecasts.json: Forecasts by kind of cell, device and commit.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.full_size.cells import Cell, Machine, Row
from benchmarks.full_size.forecast import (
    TRIAL_SECONDS,
    Forecast,
    device_name,
    forecast,
    in_words,
)
from benchmarks.full_size.state import CHECKPOINT, FILE_BYTES, has_state, pack, unpack
from benchmarks.kept import rounded

from edgegossip.contract.errors import (
    DataError,
    EdgeGossipError,
    Interrupted,
    RunFolderError,
)
from edgegossip.runs.batching import batched
from edgegossip.runs.files import locked, read_json, write_json
from edgegossip.runs.folder import finished_results
from edgegossip.runs.process import on_stop_signal
from edgegossip.runs.results import Results
from edgegossip.runs.runner import run
from edgegossip.runs.tracking import Status

UNFINISHED, FORECASTS, PROGRESS = "unfinished", "forecasts.json", "queue.json"
MARGIN = 1.2
"""Factor on forecasts, which are of a few steps."""
SLACK = 3.0
"""Seconds before the limit in which nothing is planned."""
LEAST_SECONDS = 20.0
"""Shortest time that is worth a start."""

State: TypeAlias = Literal["done", "failed", "broken", "part", "waiting", "to do"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the queue.

    Args:
        minutes: Wall minutes in which it must have stopped.
        state_bytes: Largest packed state of a run that may be stopped and continued later. A
            run with a larger state is begun only if it fits whole.
    """

    minutes: float
    state_bytes: int = 4 * FILE_BYTES


class Queue:
    """Cells with their results.

    Args:
        cells: Cells in the order of work.
        out: Folder of the results, made if missing.
        machine: Machine on which cells run.
        origin: Fields of each result that name commit, versions and so on.
        clock: Wall seconds; a test has its own.
        forecast: Forecasts a cell.
        row_of: Makes the row of a run from its results.
        say: Tells people what happens.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        out: Path,
        machine: Machine,
        origin: Mapping[str, Any],
        *,
        row_of: Callable[[Results], Row],
        clock: Callable[[], float] = time.monotonic,
        forecast: Callable[..., Forecast] = forecast,
        say: Callable[[str], None] = partial(print, flush=True),
    ) -> None:
        self.cells = tuple(cells)
        self._by_name = {cell.name: cell for cell in cells}
        self.out = out
        self._machine = machine
        self._origin = dict(origin)
        self._row_of = row_of
        self._clock = clock
        self._measure_forecast = forecast
        self._say = say
        self._device = device_name(machine.torch_device)
        self._place = f"{self._device}, commit {self._origin.get('commit')}"
        self._deadline = float("inf")
        self._alarm: Alarm | None = None  # of the last run

    # What there is.

    def state(self, cell: Cell) -> State:
        """State of a cell, by its files."""
        path = self._result(cell)
        if path.exists():
            try:
                kept = read_json(path)
                if kept["identity"] == cell.identity:
                    return "done" if kept["row"] is not None else "failed"
            except (RunFolderError, LookupError):
                return "broken"
        if has_state(self._folder(cell)):
            return "part"
        before = [self._by_name.get(name) for name in cell.after]
        is_ready = all(each and self.state(each) in ("done", "failed") for each in before)
        return "to do" if is_ready else "waiting"

    def forecast_of(self, cell: Cell) -> Forecast | None:
        """The kept forecast of a cell on this device with this code, if any."""
        kept = self._forecasts().get(cell.kind, {}).get(self._place)
        return None if kept is None else Forecast(**kept)

    def listed(self) -> Iterator[str]:
        """A line for each cell: its state, its name and its forecast."""
        states = {cell.name: self.state(cell) for cell in self.cells}
        upcoming = next(iter(self._open()), None)
        for cell in self.cells:
            state = (
                "next"
                if upcoming is cell and states[cell.name] == "to do"
                else states[cell.name]
            )
            known = self.forecast_of(cell)
            yield f"{state:8} {cell.name}" + ("" if known is None else f", {known.described()}")

    def _open(self) -> Iterator[Cell]:
        """Cells that can be run, unfinished ones first."""
        states = {cell.name: self.state(cell) for cell in self.cells}
        for wanted in ("part", "to do"):
            yield from (cell for cell in self.cells if states[cell.name] == wanted)

    # Forecasts alone.

    def foretell(self) -> None:
        """Say how long the next cell would take here, and start nothing."""
        for cell in self._open():
            self._say(f"measuring a few steps of {cell.name} on {self._device}")
            found = self._forecast(cell)
            self._say(f"{cell.name} would take {found.described()}; nothing was started")
            return
        self._say("no cell is left")

    # Work.

    def run(self, limits: Limits) -> bool:
        """Run cells until the minutes are over; return whether nothing went wrong.

        Raises:
            Interrupted: After Ctrl+C, SIGTERM or SIGHUP; the folder is valid.
        """
        self._deadline = self._clock() + 60 * limits.minutes
        tried, is_well = set[str](), True
        with locked(self.out):
            self._tidy()
            self._say_plan(limits)
            while (
                cell := next((c for c in self._open() if c.name not in tried), None)
            ) is not None:
                if self._left < LEAST_SECONDS:
                    self._say(f"{self._left:.0f} s are left; the next cell is {cell.name}")
                    break
                tried.add(cell.name)
                is_well &= self._attempt(cell, limits)
        return is_well

    @property
    def _left(self) -> float:
        return self._deadline - self._clock()

    def _tidy(self) -> None:
        """Report what cannot be used, and delete what is of no use."""
        for cell in self.cells:
            match self.state(cell):
                case "broken":
                    self._say(
                        f"{self._result(cell)} is damaged, so {cell.name} is left alone; "
                        "repair the file, or delete it to run the cell again"
                    )
                case "done" | "failed":  # by a process that was killed just after the result
                    shutil.rmtree(self._folder(cell), ignore_errors=True)
                case "waiting" | "to do" if self._folder(cell).is_dir():
                    self._say(f"{cell.name} was killed without a checkpoint, and begins anew")
                    shutil.rmtree(self._folder(cell))

    def _say_plan(self, limits: Limits) -> None:
        left = 60 * limits.minutes
        for cell in self._open():
            known = self.forecast_of(cell)
            if known is None:
                self._say(f"plan: then {cell.name}, which is measured first")
                return
            seconds = MARGIN * self._seconds_left(cell, known)
            if seconds <= left or self._may_stop(cell, known, limits):
                self._say(f"plan: {cell.name}, {known.described()}")
                left -= seconds
            if left < LEAST_SECONDS:
                return

    def _attempt(self, cell: Cell, limits: Limits) -> bool:
        """Run a cell, or say why not; return whether nothing went wrong."""
        try:
            self._alarm = None
            with on_stop_signal(self._interrupt):
                if self.forecast_of(cell) is None and self._left < TRIAL_SECONDS:
                    self._say(f"skipped {cell.name}: too little time is left to measure it")
                    return True
                known = self._forecast(cell)
                if not self._is_worth(cell, known, limits):
                    return True
                if cell.measure is not None:
                    began = self._clock()
                    self._keep(cell, cell.measure(self._machine), self._clock() - began)
                else:
                    self._train(cell, known, limits)
        except (Interrupted, KeyboardInterrupt):
            raise Interrupted(
                f"interrupted in {cell.name}; {self.out} is valid, and the same command goes on"
            ) from None
        except (DataError, RunFolderError) as error:
            self._say(f"{cell.name} cannot run: {error}")
            return False
        except EdgeGossipError as error:
            self._keep(cell, None, 0.0, error=f"{type(error).__name__}: {error}")
            self._say(f"{cell.name} failed, which is kept as its result: {error}")
        except Exception as error:  # the other cells must still run
            self._say(f"{cell.name} failed and will be tried again: {error!r:.500}")
            return False
        return True

    def _interrupt(self) -> None:
        # The alarm may ring just after its run has ended.
        if self._alarm is None or not self._alarm.has_rung:
            raise KeyboardInterrupt

    def _is_worth(self, cell: Cell, known: Forecast, limits: Limits) -> bool:
        """Decide whether a cell is begun, and say so with the reason."""
        seconds = MARGIN * self._seconds_left(cell, known)
        left = self._left
        about = f"{cell.name}, {known.described()}"
        if seconds <= left:
            self._say(f"{about}: fits into the {in_words(left)} that are left")
            return True
        if not self._may_stop(cell, known, limits):
            self._say(
                f"skipped {about}: {in_words(left)} are left, {self._why_whole(known, limits)}"
            )
            return False
        if left < MARGIN * known.stopping + LEAST_SECONDS:
            self._say(
                f"skipped {about}: {in_words(left)} are left, too little to stop it again"
            )
            return False
        self._say(f"{about}: a part of it, in the {in_words(left)} that are left")
        return True

    def _may_stop(self, cell: Cell, known: Forecast, limits: Limits) -> bool:
        if has_state(self._folder(cell)):
            return True
        is_small = (
            known.state_bytes is not None and known.state_bytes * MARGIN <= limits.state_bytes
        )
        return is_small and not self._unfinished()

    def _why_whole(self, known: Forecast, limits: Limits) -> str:
        if known.state_bytes is None:
            return "and it cannot be stopped in the middle"
        if known.state_bytes * MARGIN > limits.state_bytes:
            allowed = limits.state_bytes / 2**20
            return f"and its state is larger than --state-mib {allowed:.0f}"
        return f"and {self._unfinished()[0].name} is unfinished; only one run is, at a time"

    def _unfinished(self) -> list[Path]:
        return sorted((self.out / UNFINISHED).glob("*/"))

    def _seconds_left(self, cell: Cell, known: Forecast) -> float:
        return known.seconds * (1 - float(self._progress(cell).get("share", 0.0)))

    def _train(self, cell: Cell, known: Forecast, limits: Limits) -> None:
        assert cell.experiment is not None
        folder, progress = self._folder(cell), self._progress(cell)
        if progress.get("identity", cell.identity) != cell.identity:
            self._say(f"{cell.name} was begun with other settings, and begins anew")
            shutil.rmtree(folder)
            progress = {}
        experiment = batched(cell.experiment(self._machine, self._rows(cell)), "auto")
        session = {"commit": self._origin.get("commit"), "device": self._device, "seconds": 0.0}
        sessions = [*progress.get("wall_sessions", []), session]
        share = float(progress.get("share", 0.0))
        at = self._deadline - MARGIN * known.stopping - SLACK
        alarm = self._alarm = Alarm(self._clock, at, share)
        may_stop = known.state_bytes is not None and known.state_bytes <= limits.state_bytes
        self._keep_progress(cell, share, sessions)
        unpack(folder)
        began = self._clock()
        results: Results | None
        try:
            with alarm.set():
                results = run(
                    experiment,
                    out=folder,
                    resume=True,
                    # Writing the checkpoint of a large model takes longer than training it.
                    checkpoint_seconds=60.0 if may_stop else float("inf"),
                    progress=alarm,
                )
        except Interrupted:
            # A run that was asked to stop just before its end has ended.
            is_stopped = (folder / CHECKPOINT).exists()
            results = None if is_stopped else finished_results(folder)
            if not alarm.has_rung and results is None:
                session["seconds"] = self._clock() - began
                self._stopped(cell, alarm.share, sessions)
                raise
        session["seconds"] = self._clock() - began
        if results is None:
            self._stopped(cell, alarm.share, sessions)
            return
        row = {**self._row_of(results), "params_sha256": _digest(results)}
        total = sum(each["seconds"] for each in sessions)
        self._keep(cell, row, total, wall_sessions=sessions)
        shutil.rmtree(folder)

    def _stopped(self, cell: Cell, share: float, sessions: list[dict[str, Any]]) -> None:
        """Keep a run that was stopped."""
        folder = self._folder(cell)
        if not (folder / CHECKPOINT).exists():  # asked twice
            self._say(f"{cell.name} was stopped without a checkpoint, and begins anew")
            return
        self._keep_progress(cell, share, sessions)
        num_bytes = pack(folder)
        self._say(
            f"{cell.name} is {100 * share:.0f} % done; its state has "
            f"{num_bytes / 2**20:.1f} MiB, in files of at most {FILE_BYTES / 2**20:.0f} MiB in "
            f"{folder}, without which it begins anew"
        )

    def _keep_progress(self, cell: Cell, share: float, sessions: list[dict[str, Any]]) -> None:
        folder = self._folder(cell)
        folder.mkdir(parents=True, exist_ok=True)
        kept = {"identity": cell.identity, "share": share, "wall_sessions": sessions}
        write_json(folder / PROGRESS, kept)

    # Files.

    def _result(self, cell: Cell) -> Path:
        return self.out / f"{cell.name}.json"

    def _folder(self, cell: Cell) -> Path:
        return self.out / UNFINISHED / cell.name

    def _progress(self, cell: Cell) -> dict[str, Any]:
        path = self._folder(cell) / PROGRESS
        return read_json(path) if path.exists() else {}

    def _rows(self, cell: Cell) -> dict[str, Row]:
        found = {name: read_json(self.out / f"{name}.json") for name in cell.after}
        return {name: kept["row"] or {"error": kept["error"]} for name, kept in found.items()}

    def _keep(
        self,
        cell: Cell,
        row: Row | None,
        seconds: float,
        error: str | None = None,
        **more: Any,  # noqa: ANN401
    ) -> None:
        write_json(
            self._result(cell),
            {
                "cell": cell.name,
                "identity": cell.identity,
                "settings": cell.settings,
                **self._origin,
                "device": self._device,
                "error": error,
                "row": None if row is None else rounded(dict(row)),
                "wall_seconds": seconds,
                **more,
            },
        )
        if error is not None:
            shutil.rmtree(self._folder(cell), ignore_errors=True)

    def _forecasts(self) -> dict[str, Any]:
        path = self.out / FORECASTS
        return read_json(path) if path.exists() else {}

    def _forecast(self, cell: Cell) -> Forecast:
        if (known := self.forecast_of(cell)) is not None:
            return known
        found = self._measure_forecast(cell, self._machine, self._rows(cell))
        kept = self._forecasts()
        kept.setdefault(cell.kind, {})[self._place] = found.plain()
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / FORECASTS, kept)
        return found


class Alarm:
    """Stops a run at a time, as Ctrl+C does; a live view that follows the run.

    Args:
        clock: Wall seconds.
        at: Time at which to stop.
        share: Completed share of the run so far.

    Attributes:
        share: Completed share of the run.
        has_rung: Whether the alarm has stopped the run.
    """

    def __init__(self, clock: Callable[[], float], at: float, share: float = 0.0) -> None:
        self.share = share
        self.has_rung = False
        self._clock = clock
        self._at = at
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._outside = signal.getsignal(signal.SIGINT)

    @contextmanager
    def set(self) -> Iterator[None]:
        """Ring at the time, within this block; at an evaluation, if the clock is a test's."""
        thread = threading.Thread(target=self._wait, daemon=True)
        if self._clock is time.monotonic and self._at < float("inf"):
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()

    def update(self, status: Status) -> None:
        """Follow the run."""
        self.share = status.share
        if self._clock() >= self._at and status.share < 1:
            self._ring()

    def _wait(self) -> None:
        if self._is_over.wait(max(0.0, self._at - self._clock())):
            return
        while not self._is_over.wait(0.1):
            # While it reads its data, a run does not yet handle signals.
            if signal.getsignal(signal.SIGINT) is not self._outside:
                self._ring()
                return

    def _ring(self) -> None:
        # Once: a second signal would end the run without a checkpoint.
        with self._lock:
            if self.has_rung:
                return
            self.has_rung = True
        signal.raise_signal(signal.SIGINT)


def _digest(results: Results) -> str:
    """SHA-256 of the averaged model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(results.params.items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
