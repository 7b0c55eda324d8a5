"""Weights from trainer ranks to rollout engines, with receipts. Imports neither engine nor rollout."""

from shardwise.transfer.buckets import Assembly
from shardwise.transfer.delta import DeltaDecoder, DeltaEncoder
from shardwise.transfer.disk import DiskMedium, load_version
from shardwise.transfer.local import sync_local
from shardwise.transfer.measurement import seconds_per_byte_inside, seconds_per_byte_sent, take_pieces
from shardwise.transfer.medium import Medium, MediumError
from shardwise.transfer.process_group import ProcessGroupMedium
from shardwise.transfer.receipt import Manifest, SyncReceipt, WeightSyncError
from shardwise.transfer.shared_memory import SharedMemoryMedium
from shardwise.transfer.sync import pull_weights, push_weights
