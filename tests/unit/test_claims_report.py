"""The report's table of the units of claimed work."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.tiers import thorough
from tests.worlds import EVEN

import edgegossip as eg
from edgegossip.report.claims import claim_rows
from edgegossip.report.folder import read_folder
from edgegossip.report.page import write_report


@thorough
def test_the_report_counts_what_both_sides_of_a_partition_have_done(tmp_path: Path) -> None:
    experiment = eg.Experiment(
        task=eg.Task(
            dataset=eg.digits(),
            model=partial(eg.mlp, hidden=(8,), input_shape=(1, 8, 8), num_classes=10),
            batch_size=16,
            partition=eg.Shared(units=64),
        ),
        algorithm=eg.ClaimedWork(inner=eg.EpochGossip(topology=eg.complete(4), num_rounds=4)),
        platforms=EVEN[:4],
    )
    whole = eg.run(experiment, out=tmp_path / "whole")
    end = whole.history[-1].time
    # Both sides do all units of the last epoch.
    cut = eg.Faults(script=(eg.Partition(start=0.6 * end, end=1.1 * end, group=(0, 1)),))
    eg.run(replace(experiment, faults=cut), out=tmp_path / "cut")
    rows = {name: claim_rows(read_folder(tmp_path / name))[0] for name in ("whole", "cut")}
    assert rows["whole"].num_epochs == 4
    assert rows["whole"].num_units == 4 * 23  # of 1,437 samples
    assert rows["whole"].num_twice == rows["whole"].num_missing == 0
    assert rows["cut"].num_twice > 0
    assert rows["cut"].num_missing == 0
    page = write_report(tmp_path / "cut").read_text(encoding="utf-8")
    assert "Claimed work" in page
    assert f"<td>{rows['cut'].num_twice}</td>" in page
