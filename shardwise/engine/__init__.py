"""One model sharded with fully_shard, and its optimizer: layout, attention, logprobs, weights. No Ray, no rollouts."""

from shardwise.engine.agreement import named_failures, raised_on_every_rank, written_on_every_rank
from shardwise.engine.divergence import DivergenceKind, VocabularyTerms
from shardwise.engine.engine import LossFn, Part, TrainEngine
from shardwise.engine.files.export import StagedExport
from shardwise.engine.files.model_folder import resolve_folder
from shardwise.engine.files.rewrite_folder import rewrite_folder
from shardwise.engine.heads import HeadName
from shardwise.engine.mesh import ParallelDims, take_device
from shardwise.engine.nonfinite import PHASES, Diagnosis, Fault
from shardwise.engine.teacher_outputs import Divergence, TeacherOutputs
