"""Our recipes compare what can be compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgegossip.experiments.recipes.quickstart import DEFAULTS, quickstart
from edgegossip.experiments.runner import run


@pytest.mark.parametrize("throughput", [1000.0, 1e6])
def test_everyone_gets_the_time_that_epoch_gossip_takes(
    tmp_path: Path, throughput: float
) -> None:
    # At a million samples a second, sending takes longer than training.
    comparison = quickstart(replace(DEFAULTS, num_epochs=2, throughput=throughput))
    results = run(comparison.experiments["epoch-gossip"], out=tmp_path, num_threads=0)
    limits = {
        e.max_seconds for name, e in comparison.experiments.items() if name != "epoch-gossip"
    }
    assert limits == {results.virtual_seconds}
