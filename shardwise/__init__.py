"""Shardwise: LLM post-training built natively on PyTorch FSDP2."""

__version__ = "0.1.0"
