"""A command line with a recipe or a study, parsed."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import tyro

from edgegossip.contract.errors import Interrupted, UsageError, without_password
from edgegossip.recipes.call import Call, RecipeCall, defaults_of, option_words
from edgegossip.recipes.registry import RECIPES

AnyOptions = TypeVar("AnyOptions")
OfRecipe = TypeVar("OfRecipe", bound=Call)
Texts: TypeAlias = dict[str, list[str]]
NOT_RECORDED = (
    "out",
    "threads",
    "processes",
    "resume",
    "pool",
    "ray_address",
    "track",
    "log_format",
)
"""Options that do not affect results."""
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class Command(Generic[AnyOptions, OfRecipe]):
    """A command with its options, and the call of a recipe or a study.

    Args:
        name: Name of the command, such as run.
        options: Its own options.
        call: The recipe or study, with the given arguments.
        given: Names of the given options, of the command and of the call, as typed.
        values: Values to try of further arguments, by argument and by their text; see
            `parse_values`.
    """

    name: str
    options: AnyOptions
    call: OfRecipe
    given: tuple[str, ...]
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def default_folder(self) -> Path:
        """Default folder of results, named after the recipe and the time."""
        # A recipe file's colon and slashes make no good folder name.
        return default_folder(self.call.name.rpartition(":")[2])

    def words(self, *left_out: str, **changes: object) -> list[str]:
        """The command as words.

        Args:
            left_out: Options of the command to leave out.
            changes: Options of the command with other values, which come last.
        """
        ours = {each.name: each for each in fields(self.options)}  # type: ignore[arg-type]
        defaults = {name: each.default for name, each in ours.items()} | self.call.defaults
        known = {**vars(self.options), **self.call.arguments}
        known |= {name: tuple(texts) for name, texts in self.values.items()}
        kept = (name for name in self.given if name not in (*left_out, *changes))
        values = {name: known[name] for name in kept}
        words = [self.name, self.call.name]
        for name, value in {**values, **changes}.items():
            if name in ours and "UseAppendAction" in str(ours[name].type):
                assert isinstance(value, tuple)
                words += [word for each in value for word in option_words(name, each)]
            else:
                words += option_words(name, value, defaults[name])
        return words

    def line(self, *left_out: str, **changes: object) -> str:
        """The command as one line, without passwords; see `words`."""
        words = self.words(*left_out, **changes)
        free = (without_password(each) if "://" in each else each for each in words)
        return shlex.join(["edgegossip", *free])

    @property
    def record(self) -> str:
        """The line that repeats the results, in any folder and with any number of threads."""
        return self.line(*NOT_RECORDED)

    @contextmanager
    def how_to_resume(self, out: Path) -> Iterator[None]:
        """Add to an interruption's message the command that resumes the work."""
        try:
            yield
        except Interrupted as error:
            again = self.line(resume=True, out=out)
            when = str(error).partition(";")[0]
            raise Interrupted(
                f"{when}; {out} holds everything so far; to continue: {again}"
            ) from error


def default_folder(name: str) -> Path:
    """Default folder of results, named after the recipe or study and the time."""
    return Path("runs", name, datetime.now().strftime("%Y-%m-%d-%H%M%S"))


def parse_recipe(
    command: str, kind: type[AnyOptions], words: Sequence[str]
) -> Command[AnyOptions, RecipeCall]:
    """Parse the name of a recipe, the command's options and the recipe's own.

    Args:
        command: Name of the command.
        kind: The command's options.
        words: Command-line arguments after the command.

    Raises:
        UsageError: If the recipe is unknown, or `parse` raises it.
    """
    return parse(command, kind, RecipeCall(recipe_name(command, kind, words)), words[1:])


def recipe_name(command: str, kind: type[Any], words: Sequence[str]) -> str:
    """The recipe's name, which is the first word; print the help if asked for.

    Raises:
        UsageError: If there is no name.
    """
    if words and words[0] in ("-h", "--help"):
        show_help(command, "RECIPE", kind)
    if not words or words[0].startswith("-"):
        raise UsageError(
            f"{command} needs a recipe: {next(iter(RECIPES))}, another of `edgegossip list`, "
            "or FILE.py:NAME"
        )
    return words[0]


def parse(
    command: str, kind: type[AnyOptions], call: OfRecipe, words: Sequence[str]
) -> Command[AnyOptions, OfRecipe]:
    """Parse the options of a command and of a recipe or a study, which is not called.

    Args:
        command: Name of the command.
        kind: Class of the command's options.
        call: The recipe or study; its arguments become options.
        words: Command-line arguments after its name.

    Raises:
        UsageError: If a value is out of range, or an argument of the recipe has the same name
            as an option of the command. An option that is unknown or cannot be read ends the
            process.
    """
    prog = f"edgegossip {command} {call.name}"
    make = call.function
    ours = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    theirs = defaults_of(make)
    if taken := [name for name in theirs if name in ours]:
        raise UsageError(
            f"{prog} has an option --{taken[0].replace('_', '-')} of its own; give that "
            "argument of the recipe another name"
        )

    @functools.wraps(make)
    def arguments(**values: Any) -> dict[str, Any]:  # noqa: ANN401
        return values

    try:
        options, found = tyro.cli(
            together(kind, arguments),
            prog=prog,
            # The arguments follow below, each beside its option.
            description=inspect.cleandoc(make.__doc__ or "").partition("\n\nArgs:")[0],
            args=words,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    given = tuple(dict.fromkeys(_given(words, {*ours, *theirs})))
    values = {
        each: found[each] if each in found else _field(found, each)
        for each in given
        if each in theirs
    }
    needed = [each for each in found if theirs.get(each) is inspect.Parameter.empty]
    values |= {each: found[each] for each in needed}  # their options may have other names
    return Command(name=command, options=options, call=call.replace(**values), given=given)


def _field(found: dict[str, Any], name: str) -> Any:  # noqa: ANN401
    """The value of an argument that is a field of settings."""
    settings = (each for each in found.values() if is_dataclass(each))
    return next(getattr(each, name) for each in settings if hasattr(each, name))


def _given(words: Sequence[str], known: set[str]) -> Iterator[str]:
    """Names of the options among `words`."""
    for word in words:
        if word.startswith("--") or word.partition("=")[0] == "-n":
            name = word.partition("=")[0].lstrip("-").replace("-", "_")
            name = name if name in known else name.removeprefix("no_")
            if name in known:
                yield name


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


# Several values of an option, for `sweep` and `plan`.


def parse_values(
    command: str, kind: type[AnyOptions], words: Sequence[str]
) -> Command[AnyOptions, RecipeCall]:
    """Parse a command whose recipe's options may have several values each.

    The call has only the arguments with one value; the others are in `values`.

    Args:
        command: Name of the command.
        kind: The command's options.
        words: Command-line arguments after the command.

    Raises:
        UsageError: If `parse_recipe` raises it.
    """
    call = RecipeCall(recipe_name(command, kind, words))
    fixed, swept = _split_values(command, call, words[1:])
    first = {option: texts[0] for option, texts in swept.items()}
    defaults = call.defaults

    def words_of(texts: Mapping[str, str]) -> list[str]:
        pairs = texts.items()
        return [
            w for option, x in pairs for w in _words(option, x, defaults[_argument(option)])
        ]

    def parsed(option: str, text: str) -> Any:  # noqa: ANN401
        some = words_of({**first, option: text})
        found = parse(command, kind, call, [*fixed, *some])
        return found.call.arguments[_argument(option)]

    values = {
        _argument(option): {text: parsed(option, text) for text in texts}
        for option, texts in swept.items()
    }
    found = parse(command, kind, call, [*fixed, *words_of(first)])
    kept = {name: x for name, x in found.call.arguments.items() if name not in values}
    given = tuple(dict.fromkeys(_given(words[1:], {*found.given})))
    return replace(found, call=replace(found.call, arguments=kept), given=given, values=values)


def _split_values(
    command: str, call: RecipeCall, words: Sequence[str]
) -> tuple[list[str], Texts]:
    """Separate the recipe's options with several values from all other words."""
    fixed: list[str] = []
    swept: Texts = {}
    of_one_value = _arguments_of_one_value(call.function)
    for option, texts in _grouped(words):
        if _argument(option) == "seed":
            raise UsageError(f"{command} has --seeds, such as 0..4; leave out --seed")
        if len(texts) > 1 and option.startswith("--") and _argument(option) in of_one_value:
            swept[option] = [*dict.fromkeys(texts)]
        else:
            fixed += [option, *(number for text in texts for number in _numbers(text))]
    return fixed, swept


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Group each option with its values."""
    starts = [index for index, word in enumerate(words) if word.startswith("--")]
    for start, end in itertools.pairwise([*starts, len(words)]):
        yield words[start], [*words[start + 1 : end]]


def _argument(option: str) -> str:
    return option.removeprefix("--").partition("=")[0].replace("-", "_")


def _numbers(text: str) -> list[str]:
    """Expand a range.

    >>> _numbers("0..2"), _numbers("0.1")
    (['0', '1', '2'], ['0.1'])
    """
    if (found := _RANGE.fullmatch(text)) is None:
        return [text]
    return [str(number) for number in range(int(found[1]), int(found[2]) + 1)]


def _words(option: str, text: str, default: object) -> list[str]:
    """The words that give an option a value; a switch takes none.

    >>> _words("--lr", "0.1", 0.05), _words("--shared", "False", False)
    (['--lr', '0.1'], ['--no-shared'])
    """
    if not isinstance(default, bool):
        return [option, text]
    if text not in ("True", "False"):
        raise UsageError(f"{option} may have the values True and False, got {text!r}")
    return option_words(_argument(option), text == "True", default)


def _arguments_of_one_value(make: Callable[..., Any]) -> set[str]:
    """Arguments that are no tuples, so that several values are values to try."""
    kinds: dict[str, object] = {}
    for name, parameter in inspect.signature(make).parameters.items():
        kinds[name] = parameter.annotation
        if is_dataclass(settings := parameter.default):
            kinds |= {each.name: each.type for each in fields(settings)}
    return {name for name, kind in kinds.items() if "tuple" not in str(kind)}
