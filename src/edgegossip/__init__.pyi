"""The public names: `__init__.py` imports each from here when it is first used."""

from . import contract as contract
from .algorithms.gossip.adpsgd import ADPSGD as ADPSGD
from .algorithms.gossip.all_reduce import AllReduce as AllReduce
from .algorithms.gossip.alone import Alone as Alone
from .algorithms.gossip.choco_gossip import ChocoGossip as ChocoGossip
from .algorithms.gossip.diloco import DiLoCo as DiLoCo
from .algorithms.gossip.divshare import DivShare as DivShare
from .algorithms.gossip.double_squeeze import DoubleSqueeze as DoubleSqueeze
from .algorithms.gossip.epidemic_learning import EpidemicLearning as EpidemicLearning
from .algorithms.gossip.epoch_gossip import EpochGossip as EpochGossip
from .algorithms.gossip.gasloc import GASLoC as GASLoC
from .algorithms.gossip.gosgd import GoSGD as GoSGD
from .algorithms.gossip.gossip import Gossip as Gossip
from .algorithms.gossip.noloco import NoLoCo as NoLoCo
from .algorithms.gossip.quasi_global_gossip import QuasiGlobalGossip as QuasiGlobalGossip
from .algorithms.gossip.sparseloco import SparseLoCo as SparseLoCo
from .algorithms.gossip.streaming_diloco import StreamingDiLoCo as StreamingDiLoCo
from .algorithms.gossip.swift import SWIFT as SWIFT
from .algorithms.push_sum.difference_push import DifferencePush as DifferencePush
from .algorithms.push_sum.skew_compensated_sparse_push import (
    SkewCompensatedSparsePush as SkewCompensatedSparsePush,
)
from .algorithms.push_sum.sparse_push import SparsePush as SparsePush
from .algorithms.push_sum.stochastic_gradient_push import (
    StochasticGradientPush as StochasticGradientPush,
)
from .algorithms.robust.clipping import (
    ClippedSum as ClippedSum,
    NormBound as NormBound,
    SelfCenteredClipping as SelfCenteredClipping,
)
from .algorithms.robust.coordinates import (
    CoordinateMedian as CoordinateMedian,
    TrimmedMean as TrimmedMean,
)
from .algorithms.robust.geometric_median import GeometricMedian as GeometricMedian
from .algorithms.robust.krum import Krum as Krum
from .algorithms.robust.nearest_neighbors import NearestNeighbors as NearestNeighbors
from .algorithms.server.adacomm import ADACOMM as ADACOMM
from .algorithms.server.adsp import ADSP as ADSP, ADSPPlus as ADSPPlus
from .algorithms.server.async_local_sgd import (
    AsyncLocalSGD as AsyncLocalSGD,
    FedBuff as FedBuff,
)
from .algorithms.server.decoupled_diloco import DecoupledDiLoCo as DecoupledDiLoCo
from .algorithms.server.halos import HALoS as HALoS
from .algorithms.server.heloco import HeLoCo as HeLoCo
from .algorithms.server.methods import (
    ASP as ASP,
    BSP as BSP,
    SSP as SSP,
    FixedADACOMM as FixedADACOMM,
)
from .algorithms.stages.decoupled import Decoupled as Decoupled
from .algorithms.stages.pipelined import Pipelined as Pipelined
from .algorithms.wrappers.averaged_moments import AveragedMoments as AveragedMoments
from .algorithms.wrappers.batch_tune import BatchTune as BatchTune
from .algorithms.wrappers.claimed.claimed_work import ClaimedWork as ClaimedWork
from .algorithms.wrappers.clipped_messages import ClippedMessages as ClippedMessages
from .algorithms.wrappers.control_variates import ControlVariates as ControlVariates
from .algorithms.wrappers.edge_gossip.edge_gossip import EdgeGossip as EdgeGossip
from .algorithms.wrappers.shards.shards import Shards as Shards
from .algorithms.wrappers.standby.standby import Standby as Standby
from .algorithms.wrappers.trailing_average import TrailingAverage as TrailingAverage
from .compression.compressor import PerChunk as PerChunk, PerLayer as PerLayer
from .compression.sparse import RandomK as RandomK, TopK as TopK
from .compression.values import BFloat16 as BFloat16, Quantize as Quantize, Sign as Sign
from .contract.algorithm import UNTIL_CUT_OFF as UNTIL_CUT_OFF, Algorithm as Algorithm
from .contract.base_graph import base_graph as base_graph
from .contract.errors import EdgeGossipError as EdgeGossipError, Interrupted as Interrupted
from .contract.mixing import mixing_matrix as mixing_matrix, spectral_gap as spectral_gap
from .contract.topology import (
    complete as complete,
    directed_exponential as directed_exponential,
    directed_ring as directed_ring,
    from_edges as from_edges,
    intermittent as intermittent,
    one_peer_exponential as one_peer_exponential,
    random_matching as random_matching,
    random_one_peer as random_one_peer,
    random_receivers as random_receivers,
    random_regular as random_regular,
    ring as ring,
    star as star,
    torus as torus,
)
from .data.dataset import (
    Dataset as Dataset,
    from_numpy as from_numpy,
    from_tensors as from_tensors,
    from_torch as from_torch,
)
from .data.hold_out import hold_out as hold_out
from .data.local import Local as Local
from .data.partition import (
    IID as IID,
    BySubject as BySubject,
    Dirichlet as Dirichlet,
    LabelSkew as LabelSkew,
    Proportional as Proportional,
    Shared as Shared,
)
from .data.pictures import flip_and_crop as flip_and_crop, pictures as pictures
from .data.readers import (
    cifar10 as cifar10,
    digits as digits,
    fashion_mnist as fashion_mnist,
    har as har,
    huggingface as huggingface,
    mnist as mnist,
    npz as npz,
)
from .data.texts import books as books, texts as texts
from .integrations.lightning import lightning_callback as lightning_callback
from .integrations.ray_runs import RayRuns as RayRuns
from .integrations.trackers import MLflow as MLflow, TensorBoard as TensorBoard, WandB as WandB
from .integrations.transformers import transformers_callback as transformers_callback
from .machine.contention import Contention as Contention
from .machine.monitor import Monitor as Monitor
from .machine.predictor import PerformancePredictor as PerformancePredictor
from .machine.profile import Profile as Profile
from .models import eight_layers as eight_layers, gpt as gpt, lenet5 as lenet5, mlp as mlp
from .net.address import Address as Address
from .net.identity.tls import TLS as TLS
from .net.memory import MemoryNetwork as MemoryNetwork
from .net.zenoh.transport import ZenohTransport as ZenohTransport
from .real.join import Connection as Connection, join as join
from .real.loop_folder import LoopFolder as LoopFolder
from .real.script import own_share as own_share, script_worker as script_worker
from .real.training_loop import LoopSettings as LoopSettings, TrainingLoop as TrainingLoop
from .recipes.baselines import edge_gossip as edge_gossip
from .recipes.edge_squeeze import edge_squeeze as edge_squeeze
from .recipes.published import as_published as as_published
from .recipes.script_averaging import averaging as averaging
from .recipes.usual import usual_algorithms as usual_algorithms
from .report.export import export as export
from .report.page import Report as Report, write_report as write_report
from .runs.best import BestModel as BestModel, KeepBest as KeepBest
from .runs.comparison import compare as compare
from .runs.experiment import (
    Comparison as Comparison,
    Experiment as Experiment,
    LossTarget as LossTarget,
    MetricTarget as MetricTarget,
)
from .runs.folder import load as load
from .runs.results import Results as Results
from .runs.runner import run as run
from .runs.tracking import Tracker as Tracker
from .sim.attack import (
    ALIE as ALIE,
    Dissensus as Dissensus,
    FalseWeight as FalseWeight,
    InnerProduct as InnerProduct,
    NegatedModel as NegatedModel,
    Scaling as Scaling,
    StaleReplay as StaleReplay,
)
from .sim.fault import (
    Arrival as Arrival,
    Crash as Crash,
    Delay as Delay,
    Drop as Drop,
    Faults as Faults,
    FlipLabels as FlipLabels,
    Leave as Leave,
    Partition as Partition,
    Poison as Poison,
    Recover as Recover,
)
from .sim.link import Link as Link, Links as Links
from .sim.machines import profile as profile
from .sim.platform import (
    ContentionTrace as ContentionTrace,
    Platform as Platform,
    ThrottlingTrace as ThrottlingTrace,
    paper as paper,
    uneven as uneven,
)
from .sim.simulator import Simulator as Simulator
from .sim.traces import (
    availability as availability,
    batch_jobs as batch_jobs,
    drift as drift,
    gpus as gpus,
    phones as phones,
)
from .training.loss import (
    TokenCrossEntropy as TokenCrossEntropy,
    model_and_batch as model_and_batch,
    next_token as next_token,
)
from .training.metrics import (
    F1 as F1,
    R2 as R2,
    Accuracy as Accuracy,
    BitsPerCharacter as BitsPerCharacter,
    ExactMatch as ExactMatch,
    MeanAbsoluteError as MeanAbsoluteError,
    MeanMetric as MeanMetric,
    Perplexity as Perplexity,
    SumsMetric as SumsMetric,
)
from .training.optimizer import (
    SGD as SGD,
    AdamW as AdamW,
    Cosine as Cosine,
    Muon as Muon,
    StepDecay as StepDecay,
    WarmUp as WarmUp,
)
from .training.sampling.accuracy_aware import AccuracyAware as AccuracyAware
from .training.sampling.aggregation import aggregator as aggregator
from .training.sampling.sampler import AccuracyAwareSampler as AccuracyAwareSampler
from .training.sampling.selection import selection as selection
from .training.stages.cutting import blocks as blocks, cut as cut, whole_names as whole_names
from .training.stages.decoupled import DecoupledStage as DecoupledStage
from .training.stages.pipelined import PipelinedStage as PipelinedStage
from .training.stages.planning import block_costs as block_costs, plan_cut as plan_cut
from .training.stages.staged import staged as staged
from .training.stages.teachers import (
    Both as Both,
    Greedy as Greedy,
    LocalLosses as LocalLosses,
    SyntheticGradients as SyntheticGradients,
)
from .training.step import TrainingStep as TrainingStep
from .training.task import Task as Task
