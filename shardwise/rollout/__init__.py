"""Rollout engines: tokens in, tokens with logprobs and a policy version out."""

from shardwise.rollout.base import RolloutEngine
from shardwise.rollout.embedded import EmbeddedEngine
from shardwise.rollout.expert_record import require_routers
from shardwise.rollout.process import EngineProcess, environment_of
from shardwise.rollout.serving import serve
from shardwise.rollout.sglang import SglangEngine
from shardwise.rollout.sglang_server import check_sglang
from shardwise.rollout.supervised import SupervisedEngine
from shardwise.rollout.vllm import VllmEngine
