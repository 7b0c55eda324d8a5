"""Our side of grpo_step: the parts of the reinforcement learning recipe on one rank, in lockstep."""

import argparse
from pathlib import Path

import torch

from benchmarks.peers.grpo_task import PROMPTS_FILE, GrpoTask, canned_completions
from benchmarks.peers.lockstep import Pacer
from shardwise.config import RLConfig
from shardwise.controller.local import RankGroup
from shardwise.controller.process_group import Rank, process_group
from shardwise.data import PromptStream, prompt_examples
from shardwise.observability import Spans
from shardwise.recipes.learner import Learner
from shardwise.recipes.opened_model import open_model
from shardwise.recipes.placement import Ranks
from shardwise.recipes.rank.worker import Worker
from shardwise.recipes.rl_models import build_engines, open_companions
from shardwise.recipes.sampling.rollouter import Rollouter
from shardwise.recipes.sampling.sampled_tokens import with_spans
from shardwise.recipes.sampling.sampler import Sampler
from shardwise.recipes.sampling.samples import reward_metrics, rollout_metrics
from shardwise.recipes.weight_sync import WeightSync
from shardwise.rewards import make_rewards
from shardwise.types import Completion, GenerateRequest

CPU = torch.device("cpu")
TIMEOUT_SECONDS = 600
FIGURES = {"loss": "train/loss", "grad_norm": "train/grad_norm", "kl": "policy/ref_kl", "reward": "reward/mean"}
"""What the sides must agree on with canned completions, and what it is called here."""


def config_of(task: GrpoTask, folder: Path) -> RLConfig:
    """The recipe's config of this task. What is not named is the default; the optimizer's is made the peer's."""
    tree = {
        "model": {"path": str(folder)},
        "data": {
            "train_files": str(folder / PROMPTS_FILE),
            "apply_chat_template": False,
            "shuffle": False,
        },
        "rollout": {
            "num_prompts": task.num_prompts,
            "group_size": task.group_size,
            "max_response_tokens": task.max_tokens,
            "temperature": task.temperature,
        },
        "reward": {"functions": "benchmarks/peers/grpo_task.py:compute_score"},
        "algorithm": {"kl_coef": task.kl_coef},
        "trainer": {"learning_rate": task.learning_rate, "adam_betas": [0.9, 0.999], "total_steps": 1_000_000},
    }
    return RLConfig.parse(tree, origin="grpo_step")


class CannedWorker(Worker):
    """Reads completions instead of sampling them; everything else is the recipe's worker."""

    def __init__(self, device: torch.device, completions: dict[tuple[int, ...], list[list[int]]]) -> None:
        super().__init__(device)
        self._completions = completions
        self.generate = self._read

    def _read(self, requests: list[GenerateRequest]) -> list[list[Completion]]:
        return [
            with_spans(
                request,
                [
                    Completion(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason="stop", policy_version=0)
                    for ids in self._completions[tuple(request.prompt_ids)]
                ],
            )
            for request in requests
        ]


def train(config: RLConfig, group: RankGroup, pacer: Pacer, *, sync: bool) -> None:
    """The loop of recipes/rl.py without its files and checkpoints.

    Args:
        sync: bring the new weights to the rollout engine after a step, as the recipe does.
    """
    model = open_model(config.model)
    examples = prompt_examples(config.data, config.data.train_files, model.tokenizer, max_rows=None).rows
    stream = PromptStream([example.data_source for example in examples], config.data, seed=config.trainer.seed)
    ranks = Ranks.of(group, config)
    engines = build_engines(config, model, ranks.trainers, 1_000_000, open_companions(config, model))
    for engine in engines.saved.values():
        engine.load_initial_weights()
    ranks.build_rollout(model.config, config)
    assert config.reward is not None
    with make_rewards(config.reward) as rewards:
        rollouter = Rollouter(
            group, model.tokenizer, config.rollout, rewards, max_prompt_tokens=config.data.max_prompt_tokens
        )
        sampler = Sampler(rollouter, stream, examples, config)
        learner = Learner(engines, config)
        weights = WeightSync(engines.policy, ranks, examples, probe_every_syncs=config.rollout.probe_every_syncs)
        weights.sync(0)
        spans = Spans()
        going, step = pacer.ready(), 0
        while going:
            step += 1
            with spans("rollout"):
                rollout = sampler.collect(step)
            metrics = rollout.metrics | learner.learn(rollout, step, spans)
            if sync:
                with spans("sync"):
                    metrics |= weights.sync(step) | weights.probe(step)
            metrics |= rollout_metrics(rollout.groups)
            metrics |= reward_metrics(rollout.groups, mask_failed=config.masks_failed)
            values = {name: value.result() for name, value in metrics.items()}
            figures = {name: values[metric] for name, metric in FIGURES.items()}
            figures |= {"completion_tokens": values["rollout/response_tokens"]} | spans.take()
            going = pacer.step_done(rollout.num_tokens, figures.pop("loss"), **figures)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    task = GrpoTask.load(args.folder)
    torch.set_num_threads(task.threads)
    pacer = Pacer()
    config = config_of(task, args.folder)
    worker = Worker(CPU)
    if task.canned:
        tokenizer = open_model(config.model).tokenizer
        canned = canned_completions(args.folder)
        worker = CannedWorker(CPU, {tuple(tokenizer.encode(prompt)): ids for prompt, ids in canned.items()})
    with process_group(Rank.from_environment(), device_type="cpu", timeout_seconds=TIMEOUT_SECONDS) as control:
        train(config, RankGroup(worker, control, timeout_seconds=TIMEOUT_SECONDS), pacer, sync=not task.canned)


if __name__ == "__main__":
    main()
