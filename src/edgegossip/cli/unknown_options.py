"""Suggestions for options that a command does not have."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence


def unknown_option(arguments: Sequence[str], known: Mapping[str, str]) -> str | None:
    """Name the first unknown option, and a known option with a similar name or meaning.

    Args:
        arguments: Command-line arguments, as typed.
        known: Meaning of each option, by Python name.

    Returns:
        The message; None if all options are known.

    >>> unknown_option(["--learning-rate", "0.1"], {"lr": "Learning rate.", "seed": ""})
    'unknown option --learning-rate; did you mean --lr (learning rate)?'
    """
    for word in arguments:
        name = _name(word)
        if word.startswith("--") and name not in (*known, "help"):
            return f"unknown option {word.partition('=')[0]}{_suggestion(name, known)}"
    return None


def meanings(text: str | None) -> dict[str, str]:
    """The meanings in the `Args` of a docstring, by name.

    >>> meanings('''Train.
    ...
    ...     Args:
    ...         lr: Learning
    ...             rate.
    ...         seed: Of everything.
    ... ''')
    {'lr': 'Learning rate.', 'seed': 'Of everything.'}
    """
    arguments = inspect.cleandoc(text or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (\w+): ", arguments, flags=re.MULTILINE)[1:]
    return {
        name: " ".join(meaning.split())
        for name, meaning in zip(entries[::2], entries[1::2], strict=True)
    }


def _name(word: str) -> str:
    """Python name of the option in a command-line argument.

    >>> _name("--no-resume"), _name("--batch-size=3")
    ('resume', 'batch_size')
    """
    return word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")


def _suggestion(name: str, known: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    words = {*name.lower().split("_")}
    # `--learning-rate` is unlike `--lr`, whose meaning has both words.
    close += sorted(
        (each for each, text in known.items() if words <= {*re.findall(r"\w+", text.lower())}),
        key=lambda each: len(known[each]),
    )
    if not close:
        return ""
    meaning = re.split(r"[.;:,]", known[close[0]])[0]
    shown = f" ({meaning[:1].lower()}{meaning[1:]})" if meaning else ""
    return f"; did you mean --{close[0].replace('_', '-')}{shown}?"
