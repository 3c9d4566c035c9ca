"""The command that prints a completion script. Importing this module imports torch."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union

import tyro

from edgegossip.cli.certs_command import CERTS_COMMANDS
from edgegossip.cli.command import together
from edgegossip.cli.commands import (
    CompareOptions,
    ExportOptions,
    RunOptions,
    report_folder,
)
from edgegossip.cli.demo_command import Demo
from edgegossip.cli.doctor_command import Doctor
from edgegossip.cli.invite_command import BanOptions, InviteOptions, MembersOptions
from edgegossip.cli.join_command import JoinOptions, LeaveOptions
from edgegossip.cli.new_command import New
from edgegossip.cli.plan_command import PlanOptions
from edgegossip.cli.profile_command import ProfileOptions
from edgegossip.cli.router_command import RouterOptions
from edgegossip.cli.script_command import ScriptOptions
from edgegossip.cli.status_command import StatusOptions
from edgegossip.cli.study_command import StudyOptions
from edgegossip.cli.sweep_command import SweepOptions
from edgegossip.cli.watch_command import WatchOptions
from edgegossip.cli.worker_command import (
    GatherOptions,
    LaunchOptions,
    MeasureOptions,
    WorkerOptions,
)
from edgegossip.contract.errors import UsageError, unknown_name
from edgegossip.recipes.registry import RECIPES, studies

USAGE = """\
usage: edgegossip completion bash|zsh|fish

Prints a script that completes the commands of edgegossip, e.g. for bash:
  edgegossip completion bash > ~/.local/share/bash-completion/completions/edgegossip
"""
_SPEC = re.compile(r"^COMPLETION_SPEC = (.+)$", re.MULTILINE)
_MAX_DESCRIPTION = 60
SHELLS = ("bash", "zsh", "fish")
_WITH_RECIPE = {
    "run": RunOptions,
    "compare": CompareOptions,
    "sweep": SweepOptions,
    "plan": PlanOptions,
    "launch": LaunchOptions,
    "worker": WorkerOptions,
    "invite": InviteOptions,
    "gather": GatherOptions,
    "measure": MeasureOptions,
    "profile": ProfileOptions,
}
# Where there is nothing to complete, bash then offers files: a user's own recipes, run folders.
_FILES_IN_BASH = "complete -o default -o bashdefault -F _tyro_edgegossip edgegossip\n"


def completion_command(arguments: list[str]) -> int:
    """`edgegossip completion`."""
    if arguments in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if len(arguments) != 1:
        raise UsageError(f"completion needs one shell: {', '.join(SHELLS)}")
    [shell] = arguments
    if shell not in SHELLS:
        raise UsageError(unknown_name("shell", shell, SHELLS))
    print(_script(shell), end="")
    return 0


def _script(shell: str) -> str:
    """The script that completes all commands, recipes, studies and options in a shell."""
    commands = _choice(_commands())
    script = _by_tyro(commands, shell)
    # The script for fish has its specification within quotes.
    found = _SPEC.search(_by_tyro(commands, "bash") if shell == "fish" else script)
    if found is not None:
        compact = f"COMPLETION_SPEC = {_shared(ast.literal_eval(found[1]))}"
        script = _SPEC.sub(lambda _: compact, script)
    return script + (_FILES_IN_BASH if shell == "bash" else "")


def _commands() -> dict[str, Callable[..., Any]]:
    return {
        **{name: _with_names(kind, RECIPES) for name, kind in _WITH_RECIPE.items()},
        "study": _with_names(StudyOptions, studies()),
        "report": report_folder,
        "watch": WatchOptions,
        "status": StatusOptions,
        "export": ExportOptions,
        "router": RouterOptions,
        "join": JoinOptions,
        "leave": LeaveOptions,
        "members": MembersOptions,
        "ban": BanOptions,
        "script": ScriptOptions,
        "certs": _choice(CERTS_COMMANDS),
        "doctor": Doctor,
        "demo": Demo,
        "new": New,
        "list": _nothing,
        "completion": _choice(dict.fromkeys(SHELLS, _nothing)),
    }


def _by_tyro(commands: Callable[..., Any], shell: str) -> str:
    said = io.StringIO()
    # AssertionError: a shell that an older tyro does not know.
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit, AssertionError):
        tyro.cli(
            commands,
            prog="edgegossip",
            args=["--tyro-write-completion", shell, "-"],
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    if not said.getvalue():
        raise UsageError(f"the installed tyro knows no {shell}; pip install --upgrade tyro")
    return said.getvalue()


def _shared(spec: Mapping[str, Any]) -> str:
    """Write a specification for tyro as a Python expression that contains each option once.

    tyro repeats each recipe's options for each command, so a shell would read a megabyte at
    each press of Tab. The expression has no character that a shell would treat as special.
    """
    options: dict[str, str] = {}

    def written(node: Mapping[str, Any]) -> str:
        texts = [repr({**each, "description": _line(each)}) for each in node["options"]]
        names = [options.setdefault(text, f"o[{len(options)}]") for text in texts]
        below = ", ".join(f"{name!r}: {written(x)}" for name, x in node["subcommands"].items())
        about = repr(node.get("prog", node.get("description")))
        return (
            f"{{'prog': {about}, 'description': {about}, 'options': [{', '.join(names)}], "
            f"'subcommands': {{{below}}}, 'frontier_groups': {node['frontier_groups']!r}}}"
        )

    body = written(spec)
    return f"(lambda o: {body})([{', '.join(options)}])"


def _line(option: Mapping[str, Any]) -> str:
    """The beginning of an option's description, in characters that need no quoting."""
    text = " ".join(re.sub(r"[\"'$`\\]", "", option["description"]).split())
    return text if len(text) <= _MAX_DESCRIPTION else text[:_MAX_DESCRIPTION].rstrip() + "..."


def _with_names(kind: type[Any], entries: Mapping[str, Any]) -> Callable[..., Any]:
    """A command with a recipe or study; a user's own recipe gets only the command's options."""
    makers = {name: together(kind, entry.load()) for name, entry in entries.items()}
    return together(kind, _choice(makers))


def _choice(makers: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A function whose argument is one of several subcommands."""

    def chosen(command: Any) -> Any:  # noqa: ANN401
        return command

    kinds = tuple(
        Annotated[Any, tyro.conf.subcommand(name=name, constructor=make)]
        for name, make in makers.items()
    )
    chosen.__annotations__ = {"command": Union[kinds]}  # noqa: UP007 - of a tuple
    return chosen


def _nothing() -> None:
    """A command without options."""
