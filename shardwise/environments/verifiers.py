"""An agent that plays tasks of the verifiers library: its harness queries the policy, its task gives the reward.

rollout.environment: {type: agent, path: shardwise.environments.verifiers:play, parameters: {taskset: ..., agent: ...}}
"""

import json
import os
import secrets
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from shardwise.environments.agent_runner import Endpoint
from shardwise.types import Example

try:
    import verifiers.v1 as vf
except ImportError as error:
    raise ImportError(f"verifiers cannot be imported ({error}); pip install verifiers") from error

Tree = dict[str, Any]


async def play(example: Example, endpoint: Endpoint, *, taskset: Tree, agent: Tree) -> dict[str, float]:
    """Plays one task with one agent.

    Args:
        example: its extra_info.task is the index of the task in the taskset, as `task_rows` writes it.
        taskset: verifiers' config of the taskset, `{id: NAME}` and further settings.
        agent: verifiers' config of the agent, `{harness: {id: NAME}, runtime: {type: NAME}}` and further settings; the
            run sets the sampling.
    Returns:
        The task's reward as score, and its rewards and metrics by their names.
    Raises:
        RuntimeError: the episode failed, after the retries that verifiers' config allows; reports its last error.
    """
    config = _config(taskset, agent)
    task = _tasks(json.dumps(taskset, sort_keys=True))[example.extra_info["task"]]
    environment = vf.SingleAgentEnv(config)
    variable = f"SHARDWISE_API_KEY_{secrets.token_hex(8)}"  # clients read keys from there; harnesses do not inherit it
    os.environ[variable] = endpoint.api_key
    try:
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        async with environment.serving():
            episode = await environment.run_episode(task, vf.ModelContext(model=endpoint.model, client=client))
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [error for owner in (*episode.traces, episode) for error in owner.errors]
        raise RuntimeError(f"verifiers: {errors[-1].type}: {errors[-1].message}" if errors else "verifiers: no success")
    (trace,) = episode.traces
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    return {**trace.metrics, **rewards, "score": trace.reward}


def task_rows(*, taskset: Tree, num_tasks: int) -> Iterator[Tree]:
    """Yields the rows of the first `num_tasks` tasks, in the form of data files."""
    name = taskset["id"]
    for number, task in enumerate(_tasks(json.dumps(taskset, sort_keys=True))[:num_tasks]):
        yield {
            "prompt": task.data.prompt_text or f"{name} {number}",
            "data_source": name,
            "reward_model": {"ground_truth": ""},
            "extra_info": {"task": number},
        }


def _config(taskset: Tree, agent: Tree) -> Any:
    return vf.SingleAgentEnvConfig(taskset=dict(taskset), agent=dict(agent))


@lru_cache(maxsize=16)
def _tasks(taskset: str) -> list[Any]:
    """Loads the tasks of a taskset, once: they hold no state of an episode."""
    return list(vf.SingleAgentEnv(_config(json.loads(taskset), {})).taskset)
