"""The last model of EdgeGossip, and its best model by validation, on HAR.

    python -m benchmarks.best_model --data-dir data --out DIR --json OUT  # 20 minutes, one core

EdgeGossip with the learning rate that `edgegossip/rates` chose for it, on its machines and for
its time, overfits. A tenth of the training windows is held out, or a tenth of the subjects;
`KeepBest` chooses by them. Without anything held out, the last model is that of the published
races. The best test accuracy during the run is the most that any choice could reach.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kept import about, rounded
from studies.problems import HAR_CNN
from studies.race import MAX_WORK, imbalanced

import edgegossip as eg
from edgegossip.data.hold_out import hold_out
from edgegossip.recipes.baselines import HOME_LINK, balanced
from edgegossip.recipes.epoch_times import epoch_gossip_seconds
from edgegossip.recipes.tasks import ACCURACY_AWARE, make_task
from edgegossip.runs.experiment import throughput_bound
from edgegossip.runs.files import write_json

LR = 0.04
SHARE = 0.1
HELD_OUT = ("subjects", "windows", "nothing")


def race(held_out: str, seed: int, options: argparse.Namespace) -> eg.Results:
    """Run EdgeGossip once; see the module."""
    settings, platforms = replace(HAR_CNN.settings, lr=LR), imbalanced(4, 500.0, 4.0)
    dataset = HAR_CNN.load(options.data_dir)
    if held_out != "nothing":
        dataset = hold_out(dataset, SHARE, seed=seed, by_subject=held_out == "subjects")
    task = make_task(dataset, HAR_CNN.model, settings, batch_size=settings.batch_size)
    experiment = eg.Experiment(
        task=replace(task, accuracy_aware=ACCURACY_AWARE),
        algorithm=balanced(
            eg.EpochGossip(topology=eg.complete(4), num_rounds=eg.UNTIL_CUT_OFF)
        ),
        platforms=platforms,
        links=eg.Links(default=HOME_LINK),
        seed=seed,
        keep=None if held_out == "nothing" else "best",
    )
    num_epochs = 2 if options.short else settings.num_epochs
    whole = epoch_gossip_seconds(experiment.workload(), platforms, HOME_LINK, num_epochs)
    # Work is `MAX_WORK` times EpochGossip's, as in the races.
    seconds = min(whole, MAX_WORK * whole / throughput_bound(platforms))
    experiment = replace(
        experiment,
        max_seconds=seconds,
        # A tenth of a round: unchanged models are not measured again.
        evaluation_interval=whole / num_epochs / throughput_bound(platforms) / 10,
    )
    return eg.run(experiment, out=options.out / f"{held_out}-seed{seed}", num_threads=1)


def row(held_out: str, seed: int, results: eg.Results) -> dict[str, Any]:
    """The figures of one run."""
    last = [each for each in results.history if each.time >= 0.8 * results.virtual_seconds]
    best = results.best
    return {
        "held_out": held_out,
        "seed": seed,
        "last": results.final_accuracy,
        "last_fifth": sum(each.accuracy for each in last) / len(last),
        "highest": results.best_accuracy,
        **({} if best is None else {"kept": best.value, "kept_at": best.time}),
        "seconds": results.virtual_seconds,
    }


def main() -> None:
    """Run all, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--held-out", nargs="+", default=[*HELD_OUT], choices=HELD_OUT)
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    kept: dict[str, Any] = {**about(options), "lr": LR, "share": SHARE, "runs": []}
    for held_out in options.held_out:
        for seed in options.seeds:
            found = row(held_out, seed, race(held_out, seed, options))
            print(found, flush=True)
            kept["runs"].append(found)
            write_json(options.json, rounded(kept))


if __name__ == "__main__":
    main()
