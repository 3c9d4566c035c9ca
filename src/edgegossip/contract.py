"""Names for writing an algorithm: ``eg.contract``.

An algorithm whose workers wait for each other derives from `RoundBased`, or from
`NeighborAveraging` if it averages. An algorithm whose workers do not wait derives from
`Asynchronous`. Any other algorithm derives from `Algorithm` and answers events with effects
itself. `docs/contract.md` gives the rules.
"""

from edgegossip.algorithms.asynchronous import (
    Asynchronous as Asynchronous,
    AsynchronousState as AsynchronousState,
)
from edgegossip.algorithms.averaging import NeighborAveraging as NeighborAveraging
from edgegossip.algorithms.local_steps import LocalSteps as LocalSteps
from edgegossip.algorithms.rounds import (
    RoundBased as RoundBased,
    RoundState as RoundState,
    Synchronous as Synchronous,
)
from edgegossip.core.algorithm import (
    Algorithm as Algorithm,
    Setting as Setting,
    Traits as Traits,
    Wrapper as Wrapper,
)
from edgegossip.core.protocol import (
    WORKER as WORKER,
    Assign as Assign,
    Assigned as Assigned,
    Effect as Effect,
    Epochs as Epochs,
    Evaluate as Evaluate,
    Evaluated as Evaluated,
    Event as Event,
    Finish as Finish,
    Layout as Layout,
    Message as Message,
    Note as Note,
    Payload as Payload,
    Predict as Predict,
    Predicted as Predicted,
    Rank as Rank,
    Received as Received,
    Role as Role,
    Seconds as Seconds,
    Send as Send,
    SetTimer as SetTimer,
    Started as Started,
    Steps as Steps,
    TimerFired as TimerFired,
    Train as Train,
    Trained as Trained,
    Work as Work,
    WorkerJoined as WorkerJoined,
    WorkerLost as WorkerLost,
    WorkerState as WorkerState,
)
from edgegossip.core.randomness import uniform as uniform
from edgegossip.core.ranges import check_range as check_range, check_ranges as check_ranges
from edgegossip.core.schema import MessageSpec as MessageSpec, TensorSpec as TensorSpec
from edgegossip.core.trainer import Trainer as Trainer, TrainingResult as TrainingResult
