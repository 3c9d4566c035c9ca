"""The report's map of whom robust mixing distrusts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from tests.tiers import thorough
from tests.worlds import EVEN

import edgegossip as eg
from edgegossip.report.folder import read_folder
from edgegossip.report.page import write_report
from edgegossip.report.trust import trust_of


@thorough
def test_the_report_shows_a_dark_column_for_a_poisoned_worker(tmp_path: Path) -> None:
    experiment = eg.Experiment(
        task=eg.Task(
            dataset=eg.digits(),
            model=partial(eg.mlp, hidden=(8,), input_shape=(1, 8, 8), num_classes=10),
            batch_size=16,
        ),
        algorithm=eg.Gossip(
            topology=eg.complete(4), num_rounds=4, robust=eg.NearestNeighbors()
        ),
        platforms=EVEN[:4],
        faults=eg.Faults(script=(eg.Poison(rank=2, attack=eg.NegatedModel()),)),
    )
    eg.run(experiment, out=tmp_path / "run")
    shares = trust_of(read_folder(tmp_path / "run").runs[0])
    honest = [0, 1, 3]
    assert (shares[honest, 2] == 0).all()
    assert all(shares[i, j] == 1 for i in honest for j in honest if i != j)
    assert np.isnan(np.diag(shares)).all()
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Whom mixing distrusts" in page
    assert (tmp_path / "run" / "figures" / "trust.svg").exists()
