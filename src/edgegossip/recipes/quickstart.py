"""The quickstart recipe."""

from __future__ import annotations

from functools import partial

from edgegossip.data.readers import digits
from edgegossip.models import mlp
from edgegossip.recipes.baselines import compare_baselines
from edgegossip.recipes.tasks import IN_TURN, Settings
from edgegossip.runs.experiment import Comparison
from edgegossip.sim.platform import uneven

DEFAULTS = Settings(num_epochs=20, batch_size=16, lr=0.05, exchange_probability=0.1)


def quickstart(settings: Settings = DEFAULTS) -> Comparison:
    """Handwritten digits (embedded), a small MLP, 4 uneven platforms: seconds.

    `compare` takes 10 seconds on two cores.
    """
    platforms = uneven(settings.num_workers, settings.throughput)
    # One of the 360 test pictures is 0.28 pp: a target near the best accuracy would be chance.
    return compare_baselines(
        digits(),
        partial(mlp, hidden=(64,)),
        platforms,
        settings,
        accuracy_aware=IN_TURN,
        target=0.95,
    )
