"""Events of the runs of a study: shares, rounds, and the time that looking took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from studies.race import RoundWork, TrainingEvents


def test_shares_are_counted_over_whole_rounds(tmp_path: Path) -> None:
    def trained(rank: int, time: float, num_samples: int, cost: float) -> dict[str, Any]:
        return {
            "type": "trained",
            "rank": rank,
            "time": time,
            "num_samples": num_samples,
            "cost": cost,
        }

    def sent(rank: int, time: float, round_: int) -> dict[str, Any]:
        return {
            "type": "sent",
            "kind": "params",
            "rank": rank,
            "time": time,
            "round": round_,
            "end": time + 0.5,
        }

    lines = [
        {"type": "experiment", "schema": 1, "shard_sizes": [100, 100]},
        trained(0, 1.0, 100, 103.0),
        sent(0, 1.0, 0),
        trained(1, 1.1, 25, 28.0),
        sent(1, 1.1, 0),
        trained(0, 2.0, 60, 63.0),  # cut off before it was sent
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = TrainingEvents(path)
    assert events.kept_shares() == [1.0, 0.25]
    assert events.sent_by(1) == 1.6
    assert events.sent_by(2) is None
    assert events.look_share() == pytest.approx(9 / 194)
    assert events.look_share(rank=1) == pytest.approx(3 / 28)


def test_a_round_lasts_from_one_message_to_the_next(tmp_path: Path) -> None:
    def trained(time: float, cost: float) -> dict[str, Any]:
        return {"type": "trained", "rank": 0, "time": time, "num_samples": 40, "cost": cost}

    def sent(time: float, round_: int) -> dict[str, Any]:
        line = {"type": "sent", "kind": "params", "rank": 0, "time": time, "round": round_}
        return line | {"end": time}

    lines = [
        {"type": "experiment", "schema": 1, "shard_sizes": [80]},
        *(trained(1.0, 43.0), sent(1.0, 0), trained(3.0, 44.0), trained(4.0, 40.0)),
        *(sent(4.0, 1), trained(5.0, 40.0)),
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = TrainingEvents(path).round_work(rank=0, round_=1)
    assert found == RoundWork(seconds=3.0, num_blocks=2, num_samples=80, cost=84.0)
