"""A recipe of your own: a function that returns an experiment, or a comparison of several.

Its arguments become command-line options, whose help is taken from its docstring:

    edgegossip compare examples/own_recipe.py:skewed_digits --help
    edgegossip compare examples/own_recipe.py:skewed_digits --alpha 0.5 --num-workers 4
"""

from __future__ import annotations

from functools import partial
from typing import Any

import edgegossip as eg


def skewed_digits(
    alpha: float = 0.1,
    num_workers: int = 8,
    virtual_seconds: float = 5.0,
    seed: int = 0,
) -> eg.Comparison:
    """Digits dealt out unevenly; worker 1 crashes and comes back, some messages are lost.

    Args:
        alpha: Concentration of the Dirichlet partition; near 0 a worker sees few classes.
        num_workers: Number of workers, each on a platform of its own.
        virtual_seconds: Time that each algorithm gets.
        seed: Seed of everything random.
    """
    dataset = eg.digits()
    task = eg.Task(
        dataset=dataset,
        model=partial(eg.mlp, input_shape=dataset.input_shape, num_classes=10),
        optimizer=eg.SGD(lr=0.05),
        batch_size=16,
        partition=eg.Dirichlet(alpha),
    )
    faults = eg.Faults(
        script=(
            eg.Crash(at=0.4 * virtual_seconds, rank=1),
            eg.Recover(at=0.6 * virtual_seconds, rank=1),
            eg.Drop(probability=0.01),
        ),
        detection_time=0.2,
        seed=seed,
    )
    # The time limit ends both; a round that can lose a message needs a timeout.
    algorithms: dict[str, eg.Algorithm[Any]] = {
        "gossip": eg.Gossip(
            topology=eg.ring(num_workers), num_rounds=eg.UNTIL_CUT_OFF, timeout=0.5
        ),
        "gosgd": eg.GoSGD(
            topology=eg.complete(num_workers), num_rounds=eg.UNTIL_CUT_OFF, seed=seed
        ),
    }
    return eg.Comparison(
        experiments={
            name: eg.Experiment(
                task=task,
                algorithm=algorithm,
                platforms=eg.uneven(num_workers),
                faults=faults,
                seed=seed,
                max_seconds=virtual_seconds,
            )
            for name, algorithm in algorithms.items()
        },
        baseline="gossip",
        target=0.8,
    )
