"""The systems of `systems/table`: all have equally many settings to try."""

from __future__ import annotations

from studies.contest import StudySettings
from studies.systems import SYSTEMS, table

import edgegossip as eg


def test_no_system_tries_more_settings_than_another_with_one_of_its_own() -> None:
    study = table(StudySettings(seeds=(0,)))
    trials: dict[str, set[str]] = {}
    for cell in study.cells:
        if "/100-Mbit/tuning/" in cell.name:
            trials.setdefault(cell.run, set()).add(cell.name)
    assert trials.keys() == SYSTEMS.keys()
    numbers = {name: len(tried) for name, tried in trials.items()}
    assert numbers == {
        name: 3 if system.option is None else 9 for name, system in SYSTEMS.items()
    }


def test_edge_gossip_is_around_the_double_squeeze_that_runs_alone() -> None:
    alone = SYSTEMS["double-squeeze"].build(8, value=16)
    around = SYSTEMS["edge-gossip-double-squeeze"].build(8, value=16)
    assert around == eg.EdgeGossip(inner=alone)
