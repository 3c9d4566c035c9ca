"""The parameter servers of the studies, with settings to tune."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgegossip.algorithms.server.adacomm import ADACOMM
from edgegossip.algorithms.server.adsp import ADSP, ADSPPlus
from edgegossip.algorithms.server.methods import ASP, BSP, SSP, FixedADACOMM
from edgegossip.algorithms.server.reward import PaperReward
from edgegossip.algorithms.wrappers.batch_tune import BatchTune
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.contract.algorithm import UNTIL_CUT_OFF, Algorithm
from edgegossip.contract.protocol import Seconds

WINDOW: Seconds = 20.0
"""Check period where it is not tuned: 40 steps of the fastest worker; 60 s in the paper."""
MIN_INTERVAL: Seconds = 0.5
"""Minimum seconds between two commits: a step of the fastest worker."""
RATES = (0.15, 0.45, 0.05)
"""Candidate learning rates for all methods, with the most promising first."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings of a method: a candidate in tuning, or the best candidate.

    Args:
        lr: Learning rate.
        value: Value of the method's own setting; None if it has none.
    """

    lr: float
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A parameter-server method.

    Args:
        build: Makes the algorithm from the common arguments, the value and the target loss.
        option: Name of the setting to tune in addition to the learning rate; empty for none.
        values: Values to try.
    """

    build: Callable[[Mapping[str, Any], Any, float], Algorithm[Any]]
    option: str = ""
    values: tuple[float, ...] = ()

    def algorithm(self, num_workers: int, value: float | None, loss: float) -> Algorithm[Any]:
        """Make the algorithm for this many workers, to run until it is cut off."""
        common = {"num_workers": num_workers, "num_rounds": UNTIL_CUT_OFF}
        return self.build(common, value, loss)

    @property
    def middle(self) -> float | None:
        """The value with which learning rates are tried."""
        return self.values[1] if self.values else None


_TIMED: dict[str, Any] = {"window": WINDOW, "min_interval": MIN_INTERVAL}
STEPS = (5, 20, 80)
METHODS: dict[str, Method] = {
    "bsp": Method(build=lambda common, *_: BSP(**common)),
    "bsp, batches tuned": Method(build=lambda common, *_: BatchTune(inner=BSP(**common))),
    "ssp": Method(
        build=lambda common, value, _: SSP(**common, slack=value),
        option="s",
        values=(4, 40, 160),
    ),
    "asp": Method(build=lambda common, *_: ASP(**common)),
    "fixed-adacomm": Method(
        build=lambda common, value, _: FixedADACOMM(**common, tau=value),
        option="tau",
        values=STEPS,
    ),
    "fixed-adacomm, batches tuned": Method(
        build=lambda common, value, _: BatchTune(inner=FixedADACOMM(**common, tau=value)),
        option="tau",
        values=STEPS,
    ),
    "fixed-adacomm, shares balanced": Method(
        build=lambda common, value, _: EdgeGossip(inner=FixedADACOMM(**common, tau=value)),
        option="tau",
        values=STEPS,
    ),
    "adacomm": Method(
        build=lambda common, value, _: ADACOMM(**common, tau=value, window=WINDOW),
        option="tau",
        values=STEPS,
    ),
    "adsp-plus": Method(
        build=lambda common, value, _: ADSPPlus(**common, **_TIMED, rate=value),
        option="rate",
        values=(2, 5, 12),
    ),
    "adsp": Method(
        build=lambda common, value, _: ADSP(**common, window=value, min_interval=MIN_INTERVAL),
        option="window",
        values=(5, 10, 20),
    ),
    "adsp, as published": Method(
        build=lambda common, value, loss: ADSP(
            **common,
            window=value,
            min_interval=MIN_INTERVAL,
            reward=PaperReward(final_loss=loss),
            growth=1.0,
            waits_for_answer=True,
        ),
        option="window",
        values=(5, 10, 20),
    ),
}
