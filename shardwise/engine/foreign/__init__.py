"""Checkpoints of other trainers, read as data: nothing that their files name is imported or called."""

from shardwise.engine.foreign.dcp import METADATA, DcpCheckpoint
from shardwise.engine.foreign.tensors import ShardedTensor, ShardedTensors
from shardwise.engine.foreign.verl import VerlCheckpoint
