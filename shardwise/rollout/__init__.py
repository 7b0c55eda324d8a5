"""Rollout engines: tokens in, tokens with logprobs and a policy version out. Also environments that answer the policy,
and the endpoint where agents query it."""

from shardwise.rollout.agent_runner import AgentRunner, Endpoint
from shardwise.rollout.base import RolloutEngine
from shardwise.rollout.embedded import EmbeddedEngine
from shardwise.rollout.environment import Environment, EnvironmentCaller
from shardwise.rollout.expert_record import require_routers
from shardwise.rollout.http_server import HttpServer
from shardwise.rollout.process import EngineProcess, environment_of
from shardwise.rollout.serving import serve
from shardwise.rollout.sglang import SglangEngine
from shardwise.rollout.sglang_server import check_sglang
from shardwise.rollout.supervised import SupervisedEngine
from shardwise.rollout.tools import ToolEnvironment
from shardwise.rollout.vllm import VllmEngine
