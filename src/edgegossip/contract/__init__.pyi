"""The names of `edgegossip.contract`: `__init__.py` imports each when it is first used."""

from .algorithm import (
    Algorithm as Algorithm,
    Setting as Setting,
    Traits as Traits,
    Wrapper as Wrapper,
    WrapperState as WrapperState,
    opened as opened,
    with_numbers as with_numbers,
    without_numbers as without_numbers,
)
from .asynchronous import Asynchronous as Asynchronous, AsynchronousState as AsynchronousState
from .averaging import (
    NeighborAveraging as NeighborAveraging,
    RobustRounds as RobustRounds,
)
from .errors import (
    LocalProtocolError as LocalProtocolError,
    PlatformError as PlatformError,
    ServerLostError as ServerLostError,
)
from .mixing import MetropolisHastings as MetropolisHastings, MixingRule as MixingRule
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
    Units as Units,
    Work as Work,
    WorkerJoined as WorkerJoined,
    WorkerLost as WorkerLost,
    WorkerState as WorkerState,
)
from .randomness import uniform as uniform
from .ranges import (
    check_choices as check_choices,
    check_counts as check_counts,
    check_range as check_range,
    check_ranges as check_ranges,
)
from .reliable_links import (
    RESEND as RESEND,
    Awaiting as Awaiting,
    NextRound as NextRound,
    ReliableLinks as ReliableLinks,
)
from .robust import (
    Mixed as Mixed,
    RobustRule as RobustRule,
    robust_field as robust_field,
)
from .rounds import (
    LocalSteps as LocalSteps,
    RoundBased as RoundBased,
    RoundState as RoundState,
    Synchronous as Synchronous,
)
from .schema import (
    Limits as Limits,
    MessageSpec as MessageSpec,
    TensorSpec as TensorSpec,
    by_origin as by_origin,
)
from .trainer import Trainer as Trainer, TrainingResult as TrainingResult
