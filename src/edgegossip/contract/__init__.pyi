"""The names of `edgegossip.contract`: `__init__.py` imports each when it is first used."""

from .algorithm import (
    Algorithm as Algorithm,
    Setting as Setting,
    Traits as Traits,
    Wrapper as Wrapper,
)
from .asynchronous import (
    Asynchronous as Asynchronous,
    AsynchronousState as AsynchronousState,
)
from .protocol import (
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
from .randomness import uniform as uniform
from .ranges import check_range as check_range, check_ranges as check_ranges
from .rounds import (
    LocalSteps as LocalSteps,
    NeighborAveraging as NeighborAveraging,
    RoundBased as RoundBased,
    RoundState as RoundState,
    Synchronous as Synchronous,
)
from .schema import MessageSpec as MessageSpec, TensorSpec as TensorSpec
from .trainer import Trainer as Trainer, TrainingResult as TrainingResult
