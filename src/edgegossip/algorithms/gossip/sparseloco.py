"""SparseLoCo: many local steps, then the few largest entries of a decaying error memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edgegossip.algorithms.gossip.diloco import DiLoCo, DiLoCoState
from edgegossip.compression.compressor import Compressor, PerChunk
from edgegossip.compression.sparse import TopK
from edgegossip.compression.values import Quantize
from edgegossip.contract import Trained, check_ranges


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(DiLoCo):
    r"""`DiLoCo` whose momentum is what compression holds back.

    In each round worker :math:`i` takes `local_steps` SGD steps from the shared model
    :math:`x`, which change the parameters by :math:`\Delta_i`. With compressor :math:`C`, decay
    :math:`\beta` and outer learning rate :math:`\alpha`

    .. math::
        v_i = \beta e_i + \Delta_i, \quad q_i = C(v_i), \quad e_i \leftarrow v_i - q_i, \quad
        x \leftarrow x + \tfrac{\alpha}{n} \sum_{j} q_j

    An entry is sent when its progress over several rounds has become one of the largest of its
    chunk. The memory :math:`e_i` thus does what outer momentum does, without a vector that all
    workers share. In `DiLoCo` the memory does not decay, and training starts from
    :math:`x + e_i`. With :math:`\beta = 1` and one local step per round, this is SGD with error
    feedback.

    Messages, waiting and repairs are those of `DiLoCo`. Without compression, nothing is held
    back, :math:`\beta` has no effect, and this is `DiLoCo` without outer momentum.

    Args:
        topology: See `DiLoCo`; in the complete graph each update travels once.
        num_rounds: See `DiLoCo`.
        local_steps: See `DiLoCo`.
        compressor: :math:`C`; by default, 64 of each 4,096 entries in 2 bits.
        error_decay: :math:`\beta`, in [0, 1]; 0 forgets what was held back.
        outer_momentum: See `DiLoCo`; 0 in the paper.
        outer_lr: :math:`\alpha`, above 0.
        repair_rounds: See `DiLoCo`.
        timeout: See `DiLoCo`.
        seed: See `DiLoCo`.

    Raises:
        ValueError: If some worker cannot reach all others over the topology's period, or a
            number is out of range.

    References:
        Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
        arXiv:2508.15706. The paper keeps 1 to 3 % of the entries in 2 bits. The size and form
        of its chunks are not certain; here they are consecutive entries of the whole model.
        Departures: flooding over any graph; the inner optimizer is the task's; levels of 2 bits
        are fitted (`Quantize`); repairs.
    """

    compressor: Compressor = PerChunk(TopK(keep_ratio=1 / 64, values=Quantize(bits=2)))
    outer_momentum: float = 0.0
    error_decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, error_decay="in [0, 1]")

    def start(self, state: DiLoCoState) -> Tensor:
        return state.params  # the memory is momentum, and not this worker's place

    def learn(self, state: DiLoCoState, trained: Trained) -> None:
        state.error = self.error_decay * state.error
        super().learn(state, trained)
