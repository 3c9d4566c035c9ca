"""The simulator, a network in memory and one over sockets do the same, to the last bit."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from tests.algorithms import ALL, ALONE, NUM_WORKERS, UNTIMED
from tests.parity import Replay, run_hosts, simulate
from tests.tiers import by_name, thorough
from tests.transports import OverZenoh

from edgegossip.contract.algorithm import Algorithm
from edgegossip.net.memory import MemoryNetwork

EACH = {**ALL, "alone": ALONE}
FEW = {"adsp", "gossip", "gosgd", "sparse-push", "gossip-balanced-gossip", "pipelined-diloco"}


@pytest.mark.parametrize("algorithm", by_name(EACH, FEW))
def test_hosts_end_with_the_simulators_bits(algorithm: Algorithm[Any]) -> None:
    recorder, states = simulate(algorithm)
    network = MemoryNetwork()
    hosts = run_hosts(Replay(algorithm, recorder.trace), network.transport)
    for host, state in zip(hosts, states, strict=True):
        assert torch.equal(host.state.params, state.params)
        assert host.state.round == state.round
        assert not host.refusals


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALL.values(), ids=ALL)
def test_hosts_over_sockets_end_with_the_simulators_bits(algorithm: Algorithm[Any]) -> None:
    recorder, states = simulate(algorithm)
    with closing(OverZenoh(NUM_WORKERS)) as network:
        replay = Replay(algorithm, recorder.trace)
        hosts = run_hosts(replay, lambda rank: network.transport(rank, 100 + rank))
    for host, state in zip(hosts, states, strict=True):
        assert torch.equal(host.state.params, state.params)
        assert host.state.round == state.round
        assert not host.refusals


@thorough
@pytest.mark.parametrize("algorithm", by_name(UNTIMED))
def test_synchronous_algorithms_need_no_trace_for_that(algorithm: Algorithm[Any]) -> None:
    _, states = simulate(algorithm)
    hosts = run_hosts(algorithm, MemoryNetwork().transport)
    for host, state in zip(hosts, states, strict=True):
        assert torch.equal(host.state.params, state.params)
