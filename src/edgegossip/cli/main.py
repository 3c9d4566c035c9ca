"""The command line: arguments in, exit codes out. It starts without importing torch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from edgegossip.cli.printing import complain
from edgegossip.contract.errors import EdgeGossipError, Interrupted, UsageError, unknown_name

USAGE = """\
edgegossip: train one PyTorch model together on machines of very different speed.

usage: edgegossip COMMAND [OPTIONS]

  edgegossip demo                   a first look: seconds, and nothing to download
  edgegossip new DIR --task vision  a project of your own that runs at once

  edgegossip list                   one line per recipe and study
  edgegossip run RECIPE             one algorithm of a recipe (--only NAME says which)
  edgegossip compare RECIPE         all algorithms of a recipe, side by side
  edgegossip study STUDY            a figure of a paper, or of ours, from many runs
                                    (minutes to hours; with --short, seconds)
  edgegossip sweep RECIPE           one algorithm with several settings and seeds:
                                    --lr 0.01 0.05 --seeds 0..4
  edgegossip plan RECIPE --machines FILE.toml
                                    which algorithm and settings suit these machines
  edgegossip plan RECIPE --live     the same for machines that join now and measure themselves
  edgegossip report DIR             draw the report of a folder (again)
  edgegossip watch DIR              a page that shows a run live, or replays it
                                    (--connect ENDPOINT: one on other machines)
  edgegossip status DIR             the state of each worker, in the terminal (--json)
  edgegossip export DIR             a folder for the Hugging Face hub: model, model card

  edgegossip launch RECIPE -n 4     one process per worker on this machine, over a real network
  edgegossip worker RECIPE --rank R this machine is worker R; the others are elsewhere
  edgegossip router                 join workers that cannot connect to each other
  edgegossip invite RECIPE          invite machines to a run, and connect them
  edgegossip join INVITATION        join a run with such a line, and train
  edgegossip leave --out DIR        leave a run that this machine has joined
  edgegossip members                who has joined, and who is present
  edgegossip ban NAME               expel a machine for good
  edgegossip script -n 4 FILE.py    a training script of your own, once for each worker
  edgegossip gather RECIPE --out DIR  measure and draw what workers left in DIR/workers/R
  edgegossip measure RECIPE --rank R --out DIR
                                    score the models in DIR/averaged on data that only
                                    this machine has
  edgegossip certs init|issue|...   certificates, needed outside this machine
  edgegossip profile RECIPE         how fast this machine is under load, for EdgeGossip
  edgegossip doctor                 what this machine can do, and which workers it reaches

  edgegossip completion bash        a script that completes commands in bash, zsh or fish

  edgegossip run RECIPE --help      every option of a recipe
  edgegossip study STUDY --help     every option of a study

RECIPE and STUDY are names from the list; a recipe of your own is FILE.py:NAME.
Results go to --out DIR, by default runs/NAME/STAMP; open report.html there.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code.

    0 is success, 1 a failure, 2 wrong usage, 3 a real run whose workers end with different
    models (`real.agreement`), and 130 Ctrl+C.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        _complain(error)
        return 2
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (EdgeGossipError, ValueError, OSError) as error:  # ValueError: out of range
        _complain(error)
        return 130 if isinstance(error, Interrupted) else 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        return 2
    command, *rest = arguments
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        import importlib.metadata

        print(importlib.metadata.version("edgegossip"))
        return 0
    if command not in _COMMANDS:
        raise UsageError(unknown_name("command", command, _COMMANDS))
    return _COMMANDS[command](rest)


def _list(arguments: list[str]) -> int:
    from edgegossip.recipes.registry import RECIPES, studies

    if arguments in (["-h"], ["--help"]):
        print("usage: edgegossip list\n\nPrints one line per recipe, and in a clone per study.")
        return 0
    if arguments:
        raise UsageError(f"list takes no arguments, got {' '.join(arguments)}")
    entries = RECIPES | studies()
    width = max(map(len, entries))
    for name, entry in entries.items():
        print(f"{name:{width}}  {entry.summary}")
    return 0


def _imported(module: str, function: str) -> Callable[[list[str]], int]:
    """A command whose module, and thus torch, is imported on use."""

    def command(arguments: list[str]) -> int:
        imported = importlib.import_module(module)
        code: int = getattr(imported, function)(arguments)
        return code

    return command


def _plan(arguments: list[str]) -> int:
    if "--live" in arguments:
        return _imported("edgegossip.cli.live.coordinator", "live_plan_command")(arguments)
    return _imported("edgegossip.cli.plan_command", "plan_command")(arguments)


def _complain(error: object) -> None:
    with suppress(OSError):  # nobody reads it where a terminal was closed
        complain(str(error))


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": _imported("edgegossip.cli.demo_command", "demo_command"),
    "new": _imported("edgegossip.cli.new_command", "new_command"),
    "list": _list,
    "run": _imported("edgegossip.cli.commands", "run_command"),
    "compare": _imported("edgegossip.cli.commands", "compare_command"),
    "study": _imported("edgegossip.cli.study_command", "study_command"),
    "plan": _plan,
    "sweep": _imported("edgegossip.cli.sweep_command", "sweep_command"),
    "report": _imported("edgegossip.cli.commands", "report_command"),
    "watch": _imported("edgegossip.cli.watch_command", "watch_command"),
    "status": _imported("edgegossip.cli.status_command", "status_command"),
    "export": _imported("edgegossip.cli.commands", "export_command"),
    "launch": _imported("edgegossip.cli.worker_command", "launch_command"),
    "worker": _imported("edgegossip.cli.worker_command", "worker_command"),
    "router": _imported("edgegossip.cli.router_command", "router_command"),
    "invite": _imported("edgegossip.cli.invite_command", "invite_command"),
    "join": _imported("edgegossip.cli.join_command", "join_command"),
    "leave": _imported("edgegossip.cli.join_command", "leave_command"),
    "members": _imported("edgegossip.cli.invite_command", "members_command"),
    "ban": _imported("edgegossip.cli.invite_command", "ban_command"),
    "script": _imported("edgegossip.cli.script_command", "script_command"),
    "gather": _imported("edgegossip.cli.worker_command", "gather_command"),
    "measure": _imported("edgegossip.cli.worker_command", "measure_command"),
    "certs": _imported("edgegossip.cli.certs_command", "certs_command"),
    "profile": _imported("edgegossip.cli.profile_command", "profile_command"),
    "completion": _imported("edgegossip.cli.completion_command", "completion_command"),
    "doctor": _imported("edgegossip.cli.doctor_command", "doctor_command"),
}
