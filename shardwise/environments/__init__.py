"""What answers the policy between its turns: environments and tools, and the endpoint where agents query it."""

from shardwise.environments.agent_runner import AgentRunner, Endpoint
from shardwise.environments.environment import Environment, EnvironmentCaller
from shardwise.environments.http_server import HttpServer
from shardwise.environments.tools import ToolEnvironment
