"""Candidates of a plan: the algorithms of a recipe, each with settings to try."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from edgegossip.contract.errors import UsageError
from edgegossip.contract.protocol import Seconds
from edgegossip.plan.grid import Grid, Setting, by_text, settings_of
from edgegossip.recipes.call import RecipeCall
from edgegossip.runs.experiment import Comparison, Experiment

FACTORS = (1.0, 3.0, 1 / 3, 9.0, 1 / 9)
"""Learning rates to try, relative to the recipe's."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One algorithm of a recipe, with settings to try.

    Args:
        call: The recipe with its arguments, including those of `setting`.
        only: Name of the algorithm.
        setting: The arguments that differ between the proposals.
    """

    call: RecipeCall
    only: str
    setting: Setting = Setting({}, {})

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{self.only}, {self.setting.label}" if self.setting.values else self.only

    def experiment(self, seed: int, seconds: Seconds) -> Experiment:
        """Make the experiment for a run of `seconds` seconds."""
        return self.lasting(seconds).experiment(self.only, seed)

    def command(self, start: str, seconds: Seconds) -> str:
        """Command that starts the proposal on real machines.

        Args:
            start: Name of the command: launch or worker.
            seconds: Time limit.
        """
        name, *options = self.lasting(seconds).words()
        if "seconds" not in self.call.defaults:
            options += ["--max-seconds", f"{seconds:g}"]
        return shlex.join(["edgegossip", start, name, "--only", self.only, *options])

    def lasting(self, seconds: Seconds) -> RecipeCall:
        """The recipe with this duration, if it has an argument for it."""
        if "seconds" not in self.call.defaults:
            return self.call
        # Rounded as in the command, so that a plan predicts what the command does.
        return self.call.replace(seconds=float(f"{seconds:g}"))


def candidates(
    call: RecipeCall, typed: Grid, num_machines: int
) -> tuple[Comparison, dict[str, list[Proposal]]]:
    """List the settings to try for each algorithm of a recipe, the most promising first.

    An algorithm is tried with five learning rates and some values of its own settings
    (`Comparison.tunable`). Values in `typed` replace these; an argument of `call` is fixed.

    Args:
        call: The recipe with its fixed arguments.
        typed: Values to try of further arguments.
        num_machines: Number of machines.

    Returns:
        The recipe's comparison for these machines, and the proposals by algorithm name.

    Raises:
        UsageError: If the recipe, a setting or a value is invalid.
    """
    sized, comparison = _made_for(num_machines, call)
    for argument, values in typed.items():
        for value in values.values():  # a wrong one would be found hours later
            _made_for(num_machines, call.replace(**{argument: value}))
    found = {}
    for only in comparison.experiments:
        grid = _values_to_try(call, typed, comparison, only)
        settings = settings_of(grid)
        first = next(iter(settings)).values
        # Settings with few values that are not the most promising ones come first.
        settings.sort(key=lambda each: sum(each.values[x] != first[x] for x in first))
        number = {"num_workers": sized.arguments["num_workers"]}
        found[only] = [
            Proposal(
                call=replace(call, arguments={**call.arguments, **each.values, **number}),
                only=only,
                setting=each,
            )
            for each in settings
        ]
    return comparison, found


def _values_to_try(call: RecipeCall, typed: Grid, comparison: Comparison, only: str) -> Grid:
    """Values to try for each argument, the most promising first."""
    tried = {name: by_text(*some) for name, some in comparison.tunable.get(only, {}).items()}
    lr = call.defaults.get("lr")
    if isinstance(lr, int | float):
        tried["lr"] = by_text(*(float(f"{lr * factor:.3g}") for factor in FACTORS))
    # A setting of one algorithm is not varied for the others.
    of_some = {name for some in comparison.tunable.values() for name in some}
    tried |= {
        name: dict(values)
        for name, values in typed.items()
        if name in tried or name not in of_some
    }
    return {name: values for name, values in tried.items() if name not in call.arguments}


def _made_for(wanted: int, call: RecipeCall) -> tuple[RecipeCall, Comparison]:
    """Make the recipe for `wanted` machines, one of which may be its server.

    Raises:
        UsageError: If the recipe cannot be made for so many, or is no comparison of equally
            many machines.
    """
    for num_workers in (wanted, wanted - 1):
        sized = call.replace(num_workers=num_workers)
        made = sized.make()
        if not isinstance(made, Comparison):
            raise UsageError(f"recipe {call.name!r} is a single run; plan needs a comparison")
        names = {each.num_workers: name for name, each in made.experiments.items()}
        if len(names) > 1:
            told = ", ".join(f"{name} has {number}" for number, name in sorted(names.items()))
            raise UsageError(
                f"the systems of recipe {call.name!r} have different numbers of machines "
                f"({told}), and a plan is for systems that share the same ones; choose "
                "environments/own-machines, which has these systems on your machines, or one "
                "of systems/*"
            )
        if names.keys() == {wanted}:
            return sized, made
    raise UsageError(f"recipe {call.name!r} cannot be made for {wanted} machines")
