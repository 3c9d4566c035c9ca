"""Code common to commands with a recipe: load it, and pick one of its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgegossip.cli.options import AnyOptions, argument_names, parse, show_help
from edgegossip.contract.errors import UsageError, unknown_name
from edgegossip.recipes.registry import RECIPES, load_recipe
from edgegossip.runs.experiment import Comparison, Experiment


def parse_recipe(
    command: str, kind: type[AnyOptions], arguments: Sequence[str]
) -> tuple[str, AnyOptions, Experiment | Comparison]:
    """Parse the name of a recipe, the command's options and the recipe's own.

    Args:
        command: Name of the command, for messages.
        kind: The command's options.
        arguments: Command-line arguments after the command.

    Raises:
        UsageError: If the recipe is unknown, or returns neither an experiment nor a comparison.
    """
    name, rest = recipe_name(command, kind, arguments)
    options, chosen = parse(f"edgegossip {command} {name}", kind, load_recipe(name), rest)
    if not isinstance(chosen, Experiment | Comparison):
        raise UsageError(
            f"recipe {name!r} gave {chosen!r:.60}; it must return an Experiment or a Comparison"
        )
    return name, options, chosen


def parse_with_seed(
    command: str, kind: type[AnyOptions], arguments: Sequence[str], seed: int
) -> tuple[AnyOptions, Experiment | Comparison]:
    """Parse a recipe as `parse_recipe` does, and give its runs a seed.

    A recipe without an argument `seed` gets the seed in its experiments. Their faults and
    algorithms keep seeds of their own.

    Args:
        command: Name of the command, for messages.
        kind: The command's options.
        arguments: Name of the recipe, and command-line arguments after it.
        seed: Seed of the runs.

    Raises:
        UsageError: If `parse_recipe` raises it.
    """
    if "seed" in argument_names(load_recipe(arguments[0])):
        _, options, chosen = parse_recipe(command, kind, [*arguments, "--seed", f"{seed}"])
        return options, chosen
    _, options, chosen = parse_recipe(command, kind, arguments)
    if isinstance(chosen, Experiment):
        return options, replace(chosen, seed=seed)
    seeded = {name: replace(each, seed=seed) for name, each in chosen.experiments.items()}
    return options, replace(chosen, experiments=seeded)


def recipe_name(
    command: str, kind: type[Any], arguments: Sequence[str]
) -> tuple[str, list[str]]:
    """Split the recipe's name from the words after it; print the help if asked for.

    Args:
        command: Name of the command, for messages.
        kind: The command's options.
        arguments: Command-line arguments after the command.

    Raises:
        UsageError: If there is no name.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        show_help(command, "RECIPE", kind)
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(
            f"{command} needs a recipe: {next(iter(RECIPES))}, another of `edgegossip list`, "
            "or FILE.py:NAME"
        )
    return arguments[0], [*arguments[1:]]


def pick(name: str, chosen: Experiment | Comparison, only: str | None) -> Experiment:
    """Return the selected run: `only`, or a comparison's baseline.

    Raises:
        UsageError: If there is no such run.
    """
    if isinstance(chosen, Experiment):
        if only is not None:
            raise UsageError(f"recipe {name!r} is a single run, so leave out --only")
        return chosen
    picked = only or chosen.baseline
    if picked not in chosen.experiments:
        raise UsageError(unknown_name("algorithm", picked, chosen.experiments))
    return chosen.experiments[picked]
