"""The command that runs a script once for each worker. Importing this module imports torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from edgegossip.cli.command import default_folder
from edgegossip.cli.options import ConnectionOptions
from edgegossip.contract.errors import UsageError
from edgegossip.contract.protocol import Rank
from edgegossip.contract.ranges import check_ranges
from edgegossip.real.script import ScriptWorker, local_workers, log_path, run_script

_USAGE = "edgegossip script -n 4 [OPTIONS] FILE.py [ITS OWN ARGUMENTS]"
_SEPARATOR = "--"


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(ConnectionOptions):
    """Run a training script that uses edgegossip, once for each worker.

    The script and its own arguments come last: `edgegossip script -n 4 train.py --lr 0.1`.

    A command after `--`, such as `-- torchrun --nproc-per-node 2 FILE.py`, runs instead of
    Python, for workers that train in several processes.

    Args:
        n: Number of workers, on all machines.
        rank: Rank of the only worker to run on this machine; by default, all workers run here.
        name: Name of the run, equal for all its workers.
        out: Folder for the output of all workers but the first; by default runs/FILE/STAMP,
            after FILE.py.
    """

    n: Annotated[int, tyro.conf.arg(name="n", aliases=("-n",))]
    rank: Rank | None = None
    name: str = "script"
    out: Path | None = None

    def __post_init__(self) -> None:
        check_ranges(self, n="at least 1")
        given = [name for name in self.of_the_connection() if name != "--lease"]
        if self.rank is None and given:
            raise ValueError(f"{', '.join(given)}: for one worker only; add its --rank")

    def workers(self) -> list[ScriptWorker]:
        """The workers of this machine."""
        if self.rank is None:
            return local_workers(self.n, self.name, self.lease)
        return [
            ScriptWorker(
                rank=self.rank,
                num_workers=self.n,
                connection=self.connection(),
                name=self.name,
            )
        ]


def script_command(arguments: list[str]) -> int:
    """`edgegossip script`."""
    ours, script = _split(arguments)
    options = tyro.cli(ScriptOptions, prog="edgegossip script", args=ours)
    if not script:
        raise UsageError(f"no script; usage: {_USAGE}")
    if script[0].endswith(".py") and not Path(script[0]).is_file():
        raise UsageError(f"there is no file {script[0]}; usage: {_USAGE}")
    try:
        workers = options.workers()
    except ValueError as error:
        raise UsageError(str(error)) from error
    file = next((each for each in script if each.endswith(".py")), script[0])
    out = options.out or default_folder(Path(file).stem)
    failed = run_script(script, workers, out)
    for rank, killed in failed.items():
        path = None if rank == workers[0].rank else log_path(out, rank)
        if killed is not None:
            how = killed if path is None else f"{killed} (see {path})"
        else:
            how = "failed" if path is None else f"failed: {_last_line(path)}"
        print(f"edgegossip: worker {rank} {how}", file=sys.stderr)
    return 1 if failed else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split our options from the script and its own arguments.

    >>> _split(["-n", "4", "train.py", "--lr", "0.1"])
    (['-n', '4'], ['train.py', '--lr', '0.1'])
    >>> _split(["-n", "2", "--", "torchrun", "train.py"])
    (['-n', '2'], ['torchrun', 'train.py'])
    """
    for index, each in enumerate(arguments):
        if each == _SEPARATOR:
            return arguments[:index], arguments[index + 1 :]
        if each.endswith(".py"):
            return arguments[:index], arguments[index:]
    return arguments, []


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'no output'} (see {path})"
