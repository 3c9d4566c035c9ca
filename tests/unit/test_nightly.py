"""A night with a new seed says which it was, and how to have it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.nightly import SEARCHES, Search, main, night


def python(code: str, **environment: str) -> Search:
    return Search([["-c", code, "{seed}"]], environment)


def test_every_search_is_told_the_seed() -> None:
    for each in SEARCHES.values():
        for command in each.commands:
            assert any("{seed}" in word for word in [*command, *each.environment.values()])


def test_what_fails_is_named_with_the_command_that_does_it_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    fails, passes = (
        python("import sys; sys.exit(3)"),
        python("import sys; print(*sys.argv[1:])"),
    )
    assert night({"worlds": fails, "soak": passes}, 17) == 1
    printed = capfd.readouterr().out.splitlines()
    assert printed[0] == "seed 17"
    assert "17" in printed  # the second ran though the first had failed
    assert (
        printed[-1] == "worlds failed with seed 17; again: make nightly SEARCH=worlds SEED=17"
    )
    assert night({"soak": passes}, 17) == 0


def test_the_environment_says_the_seed_too(capfd: pytest.CaptureFixture[str]) -> None:
    shows = python("import os; print(os.environ['FIRST'])", FIRST="{seed}")
    assert night({"worlds": shows}, 17) == 0
    assert "17" in capfd.readouterr().out.splitlines()


def test_an_unknown_search_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fuzzz"])
    assert "no search fuzzz; there are swarm, hosts" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("is_ci", [False, True])
def test_hypothesis_explores_by_night_on_ci_as_elsewhere(is_ci: bool) -> None:
    code = (
        "import json, tests.conftest; from hypothesis import settings;"
        "found = settings.get_profile('explore');"
        "print(json.dumps([found.derandomize, found.max_examples]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"CI": "true"} if is_ci else {}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert json.loads(ran.stdout) == [False, 2000]
