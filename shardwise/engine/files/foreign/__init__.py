"""Checkpoints of other trainers, read as data: nothing that their files name is imported or called."""

from shardwise.engine.files.foreign.formats import ForeignCheckpoint, open_checkpoint
from shardwise.engine.files.foreign.found_weights import FoundWeights
from shardwise.engine.files.foreign.tensors import ShardedTensor, ShardedTensors
