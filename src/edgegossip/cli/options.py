"""Options common to commands, combined with those of a recipe or a study."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from edgegossip.cli.unknown_options import meanings, unknown_option
from edgegossip.contract.errors import UsageError
from edgegossip.contract.ranges import check_range
from edgegossip.integrations.ray_runs import RayRuns
from edgegossip.integrations.trackers import TrackerName, trackers
from edgegossip.machine.quota import num_cores
from edgegossip.runs.tracking import Tracker

AnyOptions = TypeVar("AnyOptions")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for results.

    Args:
        out: Folder of the results; by default runs/NAME/STAMP.
        resume: Resume the interrupted work in `out`; the result is the same as without the
            interruption.
        threads: Threads of the compute pool; by default one per core. No effect on results.
    """

    out: Path | None = None
    resume: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.out == Path():
            raise ValueError("out must be a folder of its own, got an empty name or '.'")
        if self.threads is not None:
            check_range("threads", self.threads, "at least 0")
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out DIR, the folder of the interrupted work")


@dataclass(frozen=True, kw_only=True)
class TrackOptions:
    """Options for trackers.

    Args:
        track: Also show the numbers in other programs: tensorboard, wandb (offline), mlflow,
            trackio.
    """

    track: tuple[TrackerName, ...] = ()

    @property
    def trackers(self) -> tuple[Tracker, ...]:
        """The named trackers, with their default settings."""
        return trackers(self.track)


@dataclass(frozen=True, kw_only=True)
class ManyRunsOptions(Options):
    """Options for several runs.

    Args:
        processes: Number of parallel runs, each with one thread in its own process; by default
            one per core, or 1 with `--threads`. No effect on results.
    """

    processes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("processes", self.processes, "at least 1 or None")

    @property
    def num_processes(self) -> int:
        """Number of parallel runs: as given, or one per core; 1 if only `threads` is given."""
        return self.processes or (1 if self.threads is not None else num_cores())


def check_ray_address(pool: str, ray_address: str | None) -> None:
    """Raise ValueError if an address is given without `--pool ray`."""
    if ray_address is not None and pool != "ray":
        raise ValueError("--ray-address is for --pool ray; give both")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(ManyRunsOptions):
    """Options for several runs, here or on a cluster.

    Args:
        pool: Where runs are carried out: in processes here, or on the cores of a Ray cluster,
            at most `--processes` at once. No effect on results.
        ray_address: HOST:PORT of this machine's Ray cluster, or auto; by default Ray is started
            on this machine alone and ends with the command.
    """

    pool: Literal["processes", "ray"] = "processes"
    ray_address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ray_address(self.pool, self.ray_address)
        if self.pool == "ray" and self.threads is not None:
            raise ValueError("--pool ray gives each run one core; leave out --threads")

    @property
    def at_once(self) -> RayRuns | None:
        """Carries out runs on the requested cluster; None for processes here."""
        return None if self.pool == "processes" else RayRuns(self.ray_address, self.processes)


def argument_names(make: Callable[..., Any]) -> list[str]:
    """The names of a recipe's or a study's options, including those of its settings.

    >>> from edgegossip.recipes.registry import load_recipe
    >>> "num_workers" in argument_names(load_recipe("quickstart"))
    True
    """
    names: list[str] = []
    for name, parameter in inspect.signature(make).parameters.items():
        is_nested = is_dataclass(parameter.default)
        names += [each.name for each in fields(parameter.default)] if is_nested else [name]
    return names


def parse(
    prog: str, kind: type[AnyOptions], make: Callable[..., Any], arguments: list[str]
) -> tuple[AnyOptions, Any]:
    """Parse the options of the command and of `make`, and call `make` with its own options.

    Args:
        prog: Text before the options.
        kind: Class of the command's options.
        make: Recipe or study; its arguments become options.
        arguments: Command-line arguments after `prog`.

    Raises:
        UsageError: If an option is unknown, a value is out of range, or an argument of `make`
            has the same name as an option of the command. A value that cannot be read ends the
            process.
    """
    ours = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    if taken := [name for name in argument_names(make) if name in ours]:
        raise UsageError(
            f"{prog} has an option --{taken[0].replace('_', '-')} of its own; give that "
            "argument of the recipe another name"
        )

    # The arguments follow below, each beside its option.
    description = inspect.cleandoc(make.__doc__ or "").partition("\n\nArgs:")[0]
    config = (tyro.conf.OmitArgPrefixes,)
    known = dict.fromkeys([*ours, *argument_names(make)], "")
    if message := unknown_option(arguments, known | _meanings(kind, make)):
        raise UsageError(f"{message} - {prog} --help lists all")
    try:
        return tyro.cli(
            together(kind, make),
            prog=prog,
            description=description,
            args=arguments,
            config=config,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def together(kind: type[Any], make: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Make a function that has the options of both functions and returns both results."""

    def parsed(options: Any, made: Any) -> tuple[Any, Any]:  # noqa: ANN401
        return options, made

    # `make` is known only now, so tyro is told here that its arguments are ours too.
    parsed.__annotations__ = {
        "options": Annotated[kind, tyro.conf.arg(name="")],
        "made": Annotated[Any, tyro.conf.arg(name="", constructor=make)],
    }
    return parsed


def show_help(command: str, what: str, kind: type[Any]) -> None:
    """Print the options that a command has with every recipe or study.

    Args:
        command: Name of the command.
        what: The argument that the command needs, in capitals.
        kind: Class of the command's options.
    """
    summary = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
    own, example = ("", "NAME") if what == "STUDY" else (", or FILE.py:NAME", "quickstart")
    tyro.cli(
        kind,
        prog=f"edgegossip {command} {what}",
        description=(
            f"{summary}\n\n{what} is a name that `edgegossip list` prints{own}. It has options "
            f"of its own: `edgegossip {command} {example} --help` lists all."
        ),
        args=["--help"],
    )


def _meanings(kind: type[Any], make: Callable[..., Any]) -> dict[str, str]:
    """Descriptions of options, from the docstrings of a command, a recipe and its settings."""
    defaults = (each.default for each in inspect.signature(make).parameters.values())
    settings = (inspect.getmro(type(each)) for each in defaults if is_dataclass(each))
    documented = [*kind.__mro__, *chain.from_iterable(settings), make]
    found: dict[str, str] = {}
    for each in documented:
        found |= meanings(each.__doc__)
    return found
