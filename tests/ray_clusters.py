"""Clusters of several Ray nodes on this machine, each with cores of its own."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil


class RayNodes:
    """A head node and others; needs ray."""

    def __init__(
        self, head_cores: int, other_cores: tuple[int, ...], folder: str, store_bytes: int
    ) -> None:
        from ray.cluster_utils import Cluster

        self._settings: dict[str, Any] = {
            "include_dashboard": False,
            "object_store_memory": store_bytes,
            "temp_dir": folder,
        }
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": head_cores, **self._settings}
        )
        self.others: list[Any] = []
        for each in other_cores:
            self.add_node(each)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, num_cores: int) -> None:
        settings = {"num_cpus": num_cores, **self._settings}
        self.others.append(self._cluster.add_node(**settings))

    def kill(self, node: Any) -> None:  # noqa: ANN401
        """Kill all processes of a node at once, as when a machine loses its power."""
        for started in node.all_processes.values():
            for each in started:
                process = psutil.Process(each.process.pid)
                for one in [process, *process.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def cluster(
    head_cores: int, *other_cores: int, store_bytes: int = 100 << 20
) -> Iterator[RayNodes]:
    """A cluster that ends with the block, its files with it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    folder = tempfile.mkdtemp(prefix="eg-ray-", dir="/tmp")
    nodes = None
    try:
        nodes = RayNodes(head_cores, other_cores, folder, store_bytes)
        yield nodes
    finally:
        if nodes is not None:
            nodes.close()
        shutil.rmtree(folder, ignore_errors=True)
