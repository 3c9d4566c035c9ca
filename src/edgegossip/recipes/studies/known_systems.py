"""Systems of the literature that `systems/table` sets beside each other, each with its knob."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from edgegossip.algorithms.all_reduce import AllReduce
from edgegossip.algorithms.diloco import DiLoCo
from edgegossip.algorithms.edge_gossip.wrapper import EdgeGossip
from edgegossip.algorithms.epoch_gossip import EpochGossip
from edgegossip.algorithms.gosgd import GoSGD
from edgegossip.algorithms.parameter_server.adsp import ADSP
from edgegossip.algorithms.parameter_server.bsp import BSP
from edgegossip.algorithms.parameter_server.ssp import SSP
from edgegossip.algorithms.sparse_push import SparsePush
from edgegossip.core.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.core.topology import complete, directed_ring
from edgegossip.recipes.push_sum_comparison import compressor
from edgegossip.recipes.studies.server_methods import RATES, Candidate

Build = Callable[[int, Any], Algorithm[Any]]


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to learn together.

    Args:
        build: Makes the algorithm from the number of workers and the value.
        option: Name of the setting that is tuned beside the learning rate; empty for none.
        values: That are tried, the likeliest second; none without such a setting.
        has_server: One more rank serves, and trains nothing.
    """

    build: Build
    option: str = ""
    values: tuple[float, ...] = ()
    has_server: bool = False

    def candidates(self) -> Iterator[tuple[str, Candidate]]:
        """List what is tried, by name; see `RATES`."""
        for value in self.values or (None,):
            for lr in RATES:
                own = "" if value is None else f", {self.option} = {value:g}"
                yield f"lr = {lr:g}{own}", Candidate(lr=lr, value=value)


def _rounds(workers: int) -> dict[str, Any]:
    return {"topology": complete(workers), "num_rounds": UNTIL_CUT_OFF}


def _committers(workers: int) -> dict[str, Any]:
    return {"num_workers": workers, "num_rounds": UNTIL_CUT_OFF}


SYSTEMS: dict[str, System] = {
    "all-reduce": System(build=lambda n, _: AllReduce(**_rounds(n))),
    "epoch-gossip": System(build=lambda n, _: EpochGossip(**_rounds(n))),
    "gosgd": System(
        build=lambda n, p: GoSGD(**_rounds(n), exchange_probability=p),
        option="p",
        values=(0.01, 0.05, 0.2),
    ),
    "edge-gossip": System(
        build=lambda n, share: EdgeGossip(
            inner=EpochGossip(**_rounds(n)), max_keep_ratio=share
        ),
        option="share of an epoch",
        values=(0.1, 0.3, 1.0),
    ),
    "diloco": System(
        build=lambda n, steps: DiLoCo(**_rounds(n), local_steps=int(steps)),
        option="local steps",
        values=(8, 32, 128),
    ),
    "sparse-push": System(
        build=lambda n, keep: SparsePush(
            topology=directed_ring(n),
            num_rounds=UNTIL_CUT_OFF,
            compressor=compressor(keep, 32),
        ),
        option="share kept",
        values=(0.01, 0.05, 0.1),
    ),
    "bsp": System(build=lambda n, _: BSP(**_committers(n)), has_server=True),
    "ssp": System(
        build=lambda n, slack: SSP(**_committers(n), slack=int(slack)),
        option="s",
        values=(4, 40, 160),
        has_server=True,
    ),
    "adsp": System(
        build=lambda n, window: ADSP(**_committers(n), window=window, min_interval=0.1),
        option="window",
        values=(2.0, 5.0, 10.0),
        has_server=True,
    ),
}
