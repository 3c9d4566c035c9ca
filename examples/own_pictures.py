"""A recipe for machines that have pictures of their own, which stay where they are.

Each worker reads a folder with a subfolder for each class; docs/local-data.md has the steps:

    edgegossip launch examples/own_pictures.py:own_pictures --data-dir "photos/{rank}"
"""

from __future__ import annotations

from functools import partial

import torch

import edgegossip as eg


def own_pictures(
    data_dir: str = "photos",
    classes: tuple[str, ...] = ("disc", "square"),
    num_workers: int = 3,
    num_epochs: int = 30,
    lr: float = 0.02,
    size: int = 32,
    may_share_data: bool = False,
    seed: int = 0,
) -> eg.Experiment:
    """One model from the pictures of several machines; EdgeGossip fits epochs to speeds.

    Args:
        data_dir: Folder of this worker's pictures; {rank} in it stands for the worker's rank.
        classes: Names of its subfolders, equal on all machines; some may be missing.
        num_workers: Number of machines.
        num_epochs: Epochs of the worker that needs least time for its data.
        lr: Learning rate.
        size: Pixels of a side, to which pictures are scaled.
        may_share_data: Let workers read the folders of failed ones, on storage that they share.
        seed: Seed of everything random.
    """
    data = eg.Local(
        "pictures",
        load=lambda rank: eg.pictures(data_dir.format(rank=rank), classes, size=size),
        classes=classes,
        input_shape=(3, size, size),
        mean=torch.full((3,), 0.5),
        std=torch.full((3,), 0.25),
        may_share=may_share_data,
    )
    task = eg.Task(
        dataset=data,
        model=partial(eg.lenet5, data.input_shape, len(classes)),
        optimizer=eg.SGD(lr=lr, momentum=0.9),
        batch_size=16,
    )
    inner = eg.EpochGossip(topology=eg.complete(num_workers), num_rounds=num_epochs)
    algorithm = eg.EdgeGossip(
        inner=inner, on_failure="reassign" if may_share_data else "continue"
    )
    return eg.Experiment(
        task=task,
        algorithm=algorithm,
        platforms=eg.uneven(num_workers),
        seed=seed,
        name="own-pictures",
    )
