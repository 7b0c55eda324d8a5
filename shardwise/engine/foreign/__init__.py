"""Checkpoints of other trainers, read as data: nothing that their files name is imported or called."""

from shardwise.engine.foreign.formats import ForeignCheckpoint, open_checkpoint
from shardwise.engine.foreign.found_weights import FoundWeights
from shardwise.engine.foreign.tensors import ShardedTensor, ShardedTensors
