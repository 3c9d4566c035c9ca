"""The public names: `__init__.py` imports each from here when it is first used."""

from . import contract as contract
from .algorithms.adpsgd import ADPSGD as ADPSGD
from .algorithms.all_reduce import AllReduce as AllReduce
from .algorithms.alone import Alone as Alone
from .algorithms.choco_gossip import ChocoGossip as ChocoGossip
from .algorithms.control_variates import ControlVariates as ControlVariates
from .algorithms.difference_push import DifferencePush as DifferencePush
from .algorithms.diloco import DiLoCo as DiLoCo
from .algorithms.double_squeeze import DoubleSqueeze as DoubleSqueeze
from .algorithms.edge_gossip.balancer import Balancer as Balancer
from .algorithms.edge_gossip.wrapper import EdgeGossip as EdgeGossip
from .algorithms.epoch_gossip import EpochGossip as EpochGossip
from .algorithms.gosgd import GoSGD as GoSGD
from .algorithms.gossip import Gossip as Gossip
from .algorithms.parameter_server.adacomm import ADACOMM as ADACOMM
from .algorithms.parameter_server.adsp import ADSP as ADSP
from .algorithms.parameter_server.adsp_plus import ADSPPlus as ADSPPlus
from .algorithms.parameter_server.asp import ASP as ASP
from .algorithms.parameter_server.batch_tune import BatchTune as BatchTune
from .algorithms.parameter_server.bsp import BSP as BSP
from .algorithms.parameter_server.fixed_adacomm import FixedADACOMM as FixedADACOMM
from .algorithms.parameter_server.reward import (
    ConstrainedFit as ConstrainedFit,
    LogSlope as LogSlope,
    PaperReward as PaperReward,
)
from .algorithms.parameter_server.ssp import SSP as SSP
from .algorithms.quasi_global_gossip import QuasiGlobalGossip as QuasiGlobalGossip
from .algorithms.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush as SkewCompensatedSparsePush,
)
from .algorithms.sparse_push import SparsePush as SparsePush
from .algorithms.stages.decoupled import Decoupled as Decoupled
from .algorithms.stages.pipelined import Pipelined as Pipelined
from .algorithms.stochastic_gradient_push import (
    StochasticGradientPush as StochasticGradientPush,
)
from .algorithms.trailing_average import TrailingAverage as TrailingAverage
from .cluster.ray_pool import RayPool as RayPool
from .cluster.ray_runs import RayRuns as RayRuns
from .core.algorithm import UNTIL_CUT_OFF as UNTIL_CUT_OFF, Algorithm as Algorithm
from .core.compression.compressor import Compressor as Compressor, Identity as Identity
from .core.compression.per_layer import PerLayer as PerLayer
from .core.compression.sparse import RandomK as RandomK, TopK as TopK
from .core.compression.values import BFloat16 as BFloat16, Quantize as Quantize, Sign as Sign
from .core.errors import (
    DataError as DataError,
    EdgeGossipError as EdgeGossipError,
    Interrupted as Interrupted,
    LocalProtocolError as LocalProtocolError,
    NetworkError as NetworkError,
    PlatformError as PlatformError,
    RunFolderError as RunFolderError,
    ServerLostError as ServerLostError,
    TrainingError as TrainingError,
    UsageError as UsageError,
)
from .core.metric_spec import MetricSpec as MetricSpec
from .core.metrics import consensus_distance as consensus_distance
from .core.mixing import (
    ColumnStochastic as ColumnStochastic,
    MetropolisHastings as MetropolisHastings,
    Uniform as Uniform,
    mixing_matrix as mixing_matrix,
    spectral_gap as spectral_gap,
)
from .core.schema import MessageSpec as MessageSpec, TensorSpec as TensorSpec
from .core.topology import (
    Topology as Topology,
    complete as complete,
    directed_exponential as directed_exponential,
    directed_ring as directed_ring,
    from_edges as from_edges,
    from_edges_by_round as from_edges_by_round,
    one_peer_exponential as one_peer_exponential,
    random_regular as random_regular,
    ring as ring,
    star as star,
    torus as torus,
)
from .core.varying_topology import (
    intermittent as intermittent,
    random_one_peer as random_one_peer,
)
from .deploy.join import Connection as Connection, join as join
from .deploy.script_worker import (
    ScriptWorker as ScriptWorker,
    own_share as own_share,
    script_worker as script_worker,
)
from .deploy.training_loop import TrainingLoop as TrainingLoop
from .deploy.worker import WorkerSettings as WorkerSettings, take_part as take_part
from .experiments.batching import batched as batched
from .experiments.comparison import compare as compare
from .experiments.experiment import Comparison as Comparison, Experiment as Experiment
from .experiments.results import Evaluation as Evaluation, Results as Results
from .experiments.run_target import LossTarget as LossTarget, MetricTarget as MetricTarget
from .experiments.runner import run as run
from .experiments.tracking import (
    TrackedRun as TrackedRun,
    Tracker as Tracker,
    Tracking as Tracking,
)
from .frameworks.lightning import lightning_callback as lightning_callback
from .frameworks.transformers import transformers_callback as transformers_callback
from .learning.augmentation import flip_and_crop as flip_and_crop
from .learning.built_in_metrics import (
    F1 as F1,
    R2 as R2,
    Accuracy as Accuracy,
    BitsPerCharacter as BitsPerCharacter,
    ExactMatch as ExactMatch,
    MeanAbsoluteError as MeanAbsoluteError,
    Perplexity as Perplexity,
)
from .learning.dataset import (
    ArraySplit as ArraySplit,
    Dataset as Dataset,
    TrainingData as TrainingData,
    from_tensors as from_tensors,
    from_torch as from_torch,
)
from .learning.dropout import Dropout as Dropout, replace_dropout as replace_dropout
from .learning.evaluator import Evaluator as Evaluator
from .learning.holding_out import hold_out as hold_out
from .learning.learner import Learner as Learner
from .learning.local import Local as Local
from .learning.loss import (
    TokenCrossEntropy as TokenCrossEntropy,
    model_and_batch as model_and_batch,
    next_token as next_token,
)
from .learning.metric import (
    MeanMetric as MeanMetric,
    Measurement as Measurement,
    Metric as Metric,
    SumsMetric as SumsMetric,
)
from .learning.models import (
    alexnet as alexnet,
    eight_layers as eight_layers,
    gpt as gpt,
    lenet5 as lenet5,
    mlp as mlp,
    mobilenet_v2 as mobilenet_v2,
    resnet20 as resnet20,
    sensor_cnn as sensor_cnn,
    squeezenet as squeezenet,
    vgg11 as vgg11,
    vgg16 as vgg16,
)
from .learning.nested_split import NestedSplit as NestedSplit
from .learning.numpy_split import from_numpy as from_numpy
from .learning.optimizer import SGD as SGD
from .learning.partition import (
    IID as IID,
    BySubject as BySubject,
    Dirichlet as Dirichlet,
    LabelSkew as LabelSkew,
    Proportional as Proportional,
)
from .learning.picture_folder import pictures as pictures
from .learning.readers import (
    cifar10 as cifar10,
    digits as digits,
    downsampled_imagenet as downsampled_imagenet,
    fashion_mnist as fashion_mnist,
    har as har,
    huggingface as huggingface,
    mnist as mnist,
    npz as npz,
)
from .learning.sampling.accuracy_aware import AccuracyAware as AccuracyAware
from .learning.sampling.aggregated import AggregatedData as AggregatedData
from .learning.sampling.aggregation import Aggregator as Aggregator, aggregator as aggregator
from .learning.sampling.sampler import AccuracyAwareSampler as AccuracyAwareSampler
from .learning.sampling.selection import (
    Cyclic as Cyclic,
    Focused as Focused,
    Importance as Importance,
    Pruned as Pruned,
    Random as Random,
    Ranked as Ranked,
    RankedInBatches as RankedInBatches,
    RankedPerClass as RankedPerClass,
    RankedShuffled as RankedShuffled,
    Sampled as Sampled,
    selection as selection,
)
from .learning.schedule import (
    Constant as Constant,
    Cosine as Cosine,
    Schedule as Schedule,
    StepDecay as StepDecay,
    WarmUp as WarmUp,
)
from .learning.stacked import StackedLearner as StackedLearner
from .learning.stages.both import Both as Both
from .learning.stages.cutting import (
    blocks as blocks,
    boundaries as boundaries,
    cut as cut,
    stage_models as stage_models,
    whole_names as whole_names,
)
from .learning.stages.decoupled_stage import DecoupledStage as DecoupledStage
from .learning.stages.greedy import Greedy as Greedy
from .learning.stages.local_losses import LocalLosses as LocalLosses
from .learning.stages.pipelined_stage import PipelinedStage as PipelinedStage
from .learning.stages.planning import (
    BlockCost as BlockCost,
    CutPlan as CutPlan,
    block_costs as block_costs,
    measured_costs as measured_costs,
    plan_cut as plan_cut,
)
from .learning.stages.staged import Staged as Staged, staged as staged
from .learning.stages.synthetic_gradients import SyntheticGradients as SyntheticGradients
from .learning.task import Task as Task
from .learning.texts import books as books, texts as texts
from .learning.training_step import TrainingStep as TrainingStep
from .machine.contention import Contention as Contention
from .machine.monitor import Monitor as Monitor
from .machine.predictor import (
    Forecast as Forecast,
    PerformancePredictor as PerformancePredictor,
)
from .machine.profile import Profile as Profile
from .net.address import Address as Address
from .net.host import Host as Host
from .net.host_settings import HostSettings as HostSettings
from .net.memory import MemoryNetwork as MemoryNetwork
from .net.tls import TLS as TLS
from .net.zenoh_transport import ZenohTransport as ZenohTransport
from .recipes.script_averaging import averaging as averaging
from .report.export import export as export
from .report.page import write_report as write_report
from .report.shown import Report as Report
from .sim.fault import (
    Crash as Crash,
    Delay as Delay,
    Drop as Drop,
    Faults as Faults,
    Partition as Partition,
    Recover as Recover,
)
from .sim.forecasting import profile as profile
from .sim.link import Link as Link, Links as Links
from .sim.platform import (
    ContentionTrace as ContentionTrace,
    Platform as Platform,
    Sensitivity as Sensitivity,
    ThrottlingTrace as ThrottlingTrace,
    paper as paper,
    uneven as uneven,
)
from .sim.simulator import Simulator as Simulator
from .sim.traces import batch_jobs as batch_jobs, gpus as gpus, phones as phones
from .trackers.mlflow import MLflow as MLflow
from .trackers.tensorboard import TensorBoard as TensorBoard
from .trackers.trackio import Trackio as Trackio
from .trackers.wandb import WandB as WandB
