"""The tests of each time leave out no kind of algorithm."""

from __future__ import annotations

from typing import Any

import pytest
from tests.algorithms import ALL
from tests.tiers import REPRESENTATIVES

from edgegossip.algorithms.push_sum.push_sum import PushSum
from edgegossip.algorithms.server.halos import HALoS
from edgegossip.algorithms.server.parameter_server import ParameterServer
from edgegossip.algorithms.stages.stages import Stages
from edgegossip.algorithms.wrappers.averaged_moments import AveragedMoments
from edgegossip.algorithms.wrappers.batch_tune import BatchTune
from edgegossip.algorithms.wrappers.claimed.claimed_work import ClaimedWork
from edgegossip.algorithms.wrappers.clipped_messages import ClippedMessages
from edgegossip.algorithms.wrappers.control_variates import ControlVariates
from edgegossip.algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip
from edgegossip.algorithms.wrappers.shards.shards import Shards
from edgegossip.algorithms.wrappers.standby.standby import Standby
from edgegossip.algorithms.wrappers.trailing_average import TrailingAverage
from edgegossip.contract.asynchronous import Asynchronous
from edgegossip.contract.rounds import Synchronous

KINDS = (
    Asynchronous,
    AveragedMoments,
    BatchTune,
    ClaimedWork,
    ClippedMessages,
    ControlVariates,
    EdgeGossip,
    HALoS,
    ParameterServer,
    PushSum,
    Shards,
    Stages,
    Standby,
    Synchronous,
    TrailingAverage,
)


def test_every_representative_is_an_algorithm_of_the_list() -> None:
    assert {*ALL} >= REPRESENTATIVES


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_representative(kind: type[Any]) -> None:
    assert any(isinstance(ALL[name], kind) for name in REPRESENTATIVES)


def test_every_algorithm_is_of_a_kind() -> None:
    assert all(isinstance(algorithm, KINDS) for algorithm in ALL.values())
