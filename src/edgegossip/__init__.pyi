"""The public names: `__init__.py` imports each from here when it is first used."""

from .algorithms.adpsgd import (
    ADPSGD as ADPSGD,
)
from .algorithms.all_reduce import (
    AllReduce as AllReduce,
)
from .algorithms.choco_gossip import (
    ChocoGossip as ChocoGossip,
)
from .algorithms.difference_push import (
    DifferencePush as DifferencePush,
)
from .algorithms.diloco import (
    DiLoCo as DiLoCo,
)
from .algorithms.edge_gossip.balancer import (
    Balancer as Balancer,
)
from .algorithms.edge_gossip.wrapper import (
    EdgeGossip as EdgeGossip,
)
from .algorithms.epoch_gossip import (
    EpochGossip as EpochGossip,
)
from .algorithms.gosgd import (
    GoSGD as GoSGD,
)
from .algorithms.gossip import (
    Gossip as Gossip,
)
from .algorithms.quasi_global_gossip import (
    QuasiGlobalGossip as QuasiGlobalGossip,
)
from .algorithms.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush as SkewCompensatedSparsePush,
)
from .algorithms.sparse_push import (
    SparsePush as SparsePush,
)
from .algorithms.stochastic_gradient_push import (
    StochasticGradientPush as StochasticGradientPush,
)
from .core.compression.compressor import (
    Compressor as Compressor,
)
from .core.compression.compressor import (
    Identity as Identity,
)
from .core.compression.per_layer import (
    PerLayer as PerLayer,
)
from .core.compression.sparse import (
    RandomK as RandomK,
)
from .core.compression.sparse import (
    TopK as TopK,
)
from .core.compression.values import (
    BFloat16 as BFloat16,
)
from .core.compression.values import (
    Quantize as Quantize,
)
from .core.compression.values import (
    Sign as Sign,
)
from .core.errors import (
    DataError as DataError,
)
from .core.errors import (
    EdgeGossipError as EdgeGossipError,
)
from .core.errors import (
    Interrupted as Interrupted,
)
from .core.errors import (
    NetworkError as NetworkError,
)
from .core.errors import (
    PlatformError as PlatformError,
)
from .core.errors import (
    RunFolderError as RunFolderError,
)
from .core.errors import (
    TrainingError as TrainingError,
)
from .core.metrics import (
    consensus_distance as consensus_distance,
)
from .core.mixing import (
    ColumnStochastic as ColumnStochastic,
)
from .core.mixing import (
    MetropolisHastings as MetropolisHastings,
)
from .core.mixing import (
    Uniform as Uniform,
)
from .core.mixing import (
    mixing_matrix as mixing_matrix,
)
from .core.mixing import (
    spectral_gap as spectral_gap,
)
from .core.protocol import (
    Algorithm as Algorithm,
)
from .core.schema import (
    MessageSpec as MessageSpec,
)
from .core.schema import (
    TensorSpec as TensorSpec,
)
from .core.topology import (
    Topology as Topology,
)
from .core.topology import (
    complete as complete,
)
from .core.topology import (
    directed_exponential as directed_exponential,
)
from .core.topology import (
    directed_ring as directed_ring,
)
from .core.topology import (
    from_edges as from_edges,
)
from .core.topology import (
    from_edges_by_round as from_edges_by_round,
)
from .core.topology import (
    one_peer_exponential as one_peer_exponential,
)
from .core.topology import (
    random_regular as random_regular,
)
from .core.topology import (
    ring as ring,
)
from .core.topology import (
    star as star,
)
from .core.topology import (
    torus as torus,
)
from .core.varying_topology import (
    intermittent as intermittent,
)
from .core.varying_topology import (
    random_one_peer as random_one_peer,
)
from .deploy.join import (
    Connection as Connection,
)
from .deploy.join import (
    join as join,
)
from .deploy.training_loop import (
    TrainingLoop as TrainingLoop,
)
from .deploy.worker import (
    WorkerSettings as WorkerSettings,
)
from .deploy.worker import (
    take_part as take_part,
)
from .experiments.comparison import (
    compare as compare,
)
from .experiments.experiment import (
    Comparison as Comparison,
)
from .experiments.experiment import (
    Experiment as Experiment,
)
from .experiments.results import (
    Evaluation as Evaluation,
)
from .experiments.results import (
    Results as Results,
)
from .experiments.runner import (
    run as run,
)
from .learning.augmentation import (
    flip_and_crop as flip_and_crop,
)
from .learning.dataset import (
    ArraySplit as ArraySplit,
)
from .learning.dataset import (
    Dataset as Dataset,
)
from .learning.dataset import (
    from_torch as from_torch,
)
from .learning.dropout import (
    Dropout as Dropout,
)
from .learning.dropout import (
    replace_dropout as replace_dropout,
)
from .learning.evaluator import (
    Evaluator as Evaluator,
)
from .learning.learner import (
    Learner as Learner,
)
from .learning.models import (
    alexnet as alexnet,
)
from .learning.models import (
    lenet5 as lenet5,
)
from .learning.models import (
    mlp as mlp,
)
from .learning.models import (
    mobilenet_v2 as mobilenet_v2,
)
from .learning.models import (
    resnet20 as resnet20,
)
from .learning.models import (
    sensor_cnn as sensor_cnn,
)
from .learning.models import (
    squeezenet as squeezenet,
)
from .learning.models import (
    vgg11 as vgg11,
)
from .learning.models import (
    vgg16 as vgg16,
)
from .learning.optimizer import (
    SGD as SGD,
)
from .learning.partition import (
    IID as IID,
)
from .learning.partition import (
    BySubject as BySubject,
)
from .learning.partition import (
    Dirichlet as Dirichlet,
)
from .learning.partition import (
    LabelSkew as LabelSkew,
)
from .learning.partition import (
    Proportional as Proportional,
)
from .learning.readers import (
    cifar10 as cifar10,
)
from .learning.readers import (
    digits as digits,
)
from .learning.readers import (
    downsampled_imagenet as downsampled_imagenet,
)
from .learning.readers import (
    fashion_mnist as fashion_mnist,
)
from .learning.readers import (
    har as har,
)
from .learning.readers import (
    huggingface as huggingface,
)
from .learning.readers import (
    mnist as mnist,
)
from .learning.readers import (
    npz as npz,
)
from .learning.sampling.accuracy_aware import (
    AccuracyAware as AccuracyAware,
)
from .learning.sampling.aggregated import (
    AggregatedData as AggregatedData,
)
from .learning.sampling.aggregation import (
    Aggregator as Aggregator,
)
from .learning.sampling.aggregation import (
    aggregator as aggregator,
)
from .learning.sampling.sampler import (
    AccuracyAwareSampler as AccuracyAwareSampler,
)
from .learning.sampling.selection import (
    Cyclic as Cyclic,
)
from .learning.sampling.selection import (
    Focused as Focused,
)
from .learning.sampling.selection import (
    Importance as Importance,
)
from .learning.sampling.selection import (
    Pruned as Pruned,
)
from .learning.sampling.selection import (
    Random as Random,
)
from .learning.sampling.selection import (
    Ranked as Ranked,
)
from .learning.sampling.selection import (
    RankedPerClass as RankedPerClass,
)
from .learning.sampling.selection import (
    RankedShuffled as RankedShuffled,
)
from .learning.sampling.selection import (
    Sampled as Sampled,
)
from .learning.sampling.selection import (
    selection as selection,
)
from .learning.schedule import (
    Constant as Constant,
)
from .learning.schedule import (
    Cosine as Cosine,
)
from .learning.schedule import (
    Schedule as Schedule,
)
from .learning.schedule import (
    StepDecay as StepDecay,
)
from .learning.schedule import (
    WarmUp as WarmUp,
)
from .learning.task import (
    Task as Task,
)
from .machine.contention import (
    Contention as Contention,
)
from .machine.monitor import (
    Monitor as Monitor,
)
from .machine.predictor import (
    Forecast as Forecast,
)
from .machine.predictor import (
    PerformancePredictor as PerformancePredictor,
)
from .machine.profile import (
    Profile as Profile,
)
from .net.address import (
    Address as Address,
)
from .net.host import (
    Host as Host,
)
from .net.host_settings import (
    HostSettings as HostSettings,
)
from .net.memory import (
    MemoryNetwork as MemoryNetwork,
)
from .net.tls import (
    TLS as TLS,
)
from .net.zenoh_transport import (
    ZenohTransport as ZenohTransport,
)
from .report.page import (
    write_report as write_report,
)
from .sim.fault import (
    Crash as Crash,
)
from .sim.fault import (
    Delay as Delay,
)
from .sim.fault import (
    Drop as Drop,
)
from .sim.fault import (
    Faults as Faults,
)
from .sim.fault import (
    Partition as Partition,
)
from .sim.fault import (
    Recover as Recover,
)
from .sim.forecasting import (
    profile as profile,
)
from .sim.link import (
    Link as Link,
)
from .sim.link import (
    Links as Links,
)
from .sim.platform import (
    ContentionTrace as ContentionTrace,
)
from .sim.platform import (
    Platform as Platform,
)
from .sim.platform import (
    Sensitivity as Sensitivity,
)
from .sim.platform import (
    ThrottlingTrace as ThrottlingTrace,
)
from .sim.platform import (
    paper as paper,
)
from .sim.platform import (
    uneven as uneven,
)
from .sim.simulator import (
    Simulator as Simulator,
)
from .sim.traces import (
    batch_jobs as batch_jobs,
)
from .sim.traces import (
    gpus as gpus,
)
from .sim.traces import (
    phones as phones,
)

__all__ = [
    "ADPSGD",
    "IID",
    "SGD",
    "TLS",
    "AccuracyAware",
    "AccuracyAwareSampler",
    "Address",
    "AggregatedData",
    "Aggregator",
    "Algorithm",
    "AllReduce",
    "ArraySplit",
    "BFloat16",
    "Balancer",
    "BySubject",
    "ChocoGossip",
    "ColumnStochastic",
    "Comparison",
    "Compressor",
    "Connection",
    "Constant",
    "Contention",
    "ContentionTrace",
    "Cosine",
    "Crash",
    "Cyclic",
    "DataError",
    "Dataset",
    "Delay",
    "DiLoCo",
    "DifferencePush",
    "Dirichlet",
    "Drop",
    "Dropout",
    "EdgeGossip",
    "EdgeGossipError",
    "EpochGossip",
    "Evaluation",
    "Evaluator",
    "Experiment",
    "Faults",
    "Focused",
    "Forecast",
    "GoSGD",
    "Gossip",
    "Host",
    "HostSettings",
    "Identity",
    "Importance",
    "Interrupted",
    "LabelSkew",
    "Learner",
    "Link",
    "Links",
    "MemoryNetwork",
    "MessageSpec",
    "MetropolisHastings",
    "Monitor",
    "NetworkError",
    "Partition",
    "PerLayer",
    "PerformancePredictor",
    "Platform",
    "PlatformError",
    "Profile",
    "Proportional",
    "Pruned",
    "Quantize",
    "QuasiGlobalGossip",
    "Random",
    "RandomK",
    "Ranked",
    "RankedPerClass",
    "RankedShuffled",
    "Recover",
    "Results",
    "RunFolderError",
    "Sampled",
    "Schedule",
    "Sensitivity",
    "Sign",
    "Simulator",
    "SkewCompensatedSparsePush",
    "SparsePush",
    "StepDecay",
    "StochasticGradientPush",
    "Task",
    "TensorSpec",
    "ThrottlingTrace",
    "TopK",
    "Topology",
    "TrainingError",
    "TrainingLoop",
    "Uniform",
    "WarmUp",
    "WorkerSettings",
    "ZenohTransport",
    "aggregator",
    "alexnet",
    "batch_jobs",
    "cifar10",
    "compare",
    "complete",
    "consensus_distance",
    "digits",
    "directed_exponential",
    "directed_ring",
    "downsampled_imagenet",
    "fashion_mnist",
    "flip_and_crop",
    "from_edges",
    "from_edges_by_round",
    "from_torch",
    "gpus",
    "har",
    "huggingface",
    "intermittent",
    "join",
    "lenet5",
    "mixing_matrix",
    "mlp",
    "mnist",
    "mobilenet_v2",
    "npz",
    "one_peer_exponential",
    "paper",
    "phones",
    "profile",
    "random_one_peer",
    "random_regular",
    "replace_dropout",
    "resnet20",
    "ring",
    "run",
    "selection",
    "sensor_cnn",
    "spectral_gap",
    "squeezenet",
    "star",
    "take_part",
    "torus",
    "uneven",
    "vgg11",
    "vgg16",
    "write_report",
]
