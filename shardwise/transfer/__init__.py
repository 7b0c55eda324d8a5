"""Weights from trainer ranks to rollout engines, with receipts. Imports neither engine nor rollout."""

from shardwise.transfer.base import Manifest, SyncReceipt, WeightSyncError, checksum
from shardwise.transfer.local import sync_local
