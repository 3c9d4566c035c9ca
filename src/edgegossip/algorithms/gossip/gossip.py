"""Gossip (D-PSGD): train, send the model to the neighbors, and average the received models."""

from __future__ import annotations

from dataclasses import dataclass

from edgegossip.contract import LocalSteps, NeighborAveraging, RoundState


@dataclass(frozen=True, kw_only=True)
class Gossip(LocalSteps[RoundState], NeighborAveraging[RoundState]):
    r"""Train for some local steps, send the model to the neighbors, and average those received.

    In each round worker :math:`i`

    1. takes `local_steps` SGD steps on its own data,
    2. sends :math:`x_i` to its neighbors :math:`N(i)`,
    3. waits for their models and averages:
       :math:`x_i \leftarrow W_{ii} x_i + \sum_{j \in N(i)} W_{ij} x_j`.

    Args:
        topology: Undirected communication graph; may vary in time.
        num_rounds: Number of rounds of training and mixing.
        local_steps: SGD steps between two mixings, at least 1.
        mixing: Rule that gives the rows of :math:`W`.
        timeout: See `Synchronous`.

    Raises:
        ValueError: If the topology is directed, the rule does not average, or a number is out
            of range.

    References:
        Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS
        2017, arXiv:1705.09056, Algorithm 1. Departures: mixing follows the gradient step
        instead of running in parallel; several local steps are allowed.
    """
