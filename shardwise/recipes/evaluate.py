"""Measures the accuracy of a model on held-out prompts."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.config import EvalConfig, RewardConfig, longest_sequence
from shardwise.controller.base import WorkerGroup
from shardwise.controller.watchdog import go_on
from shardwise.data import prompt_examples
from shardwise.durable import write_json_atomic
from shardwise.observability import SampleLog, move_aside, print_table
from shardwise.recipes.checkpointing.checkpoints import reading
from shardwise.recipes.checkpointing.writer_lock import writer_lock
from shardwise.recipes.engines import build_rollout_engines
from shardwise.recipes.opened_model import open_model
from shardwise.recipes.reward_engines import build_reward_engines
from shardwise.recipes.sampling.environment import require_tool_tags, tool_schemas, warn_of_unseen_tools
from shardwise.recipes.sampling.rollouter import Rollouter
from shardwise.rewards import final_answer, is_correct, make_rewards
from shardwise.types import Example, Metrics, MetricValue, RolloutGroup

_MEASURED = "measured"
"""Key in results.json: the settings that the figures were measured with."""
_NO_SOURCES = ("all", _MEASURED)
"""Keys of results.json that are not data sources; no source has these names there."""


def evaluate(config: EvalConfig, group: WorkerGroup) -> dict[str, dict[str, float]]:
    """Measures on the validation files; writes results.json, samples.jsonl and config.yaml, and moves those of an
    earlier evaluation aside; prints a table.

    Returns:
        For each data source, and for "all": num_prompts, greedy_accuracy, and with num_samples > 1 pass@k for n
        and the powers of two below it, mean@n and maj@n.
    """
    model = open_model(config.model)
    with reading(model.folder):
        model.context.require(*longest_sequence(config))
        model.warn_of_refused_images()
        require_tool_tags(config.rollout.environment, model.tokenizer)
        model.require_visible_stops(config.rollout)
        if config.data.apply_chat_template:
            model.warn_of_endless_turns(config.rollout)
        rows = prompt_examples(
            config.data,
            config.data.validation_files,
            model.tokenizer,
            max_rows=config.data.max_validation_rows,
            tools=tool_schemas(config.rollout.environment),
            vision=model.vision_in(config.rollout),
            media_token_ids=model.media_token_ids,
            on_row=go_on,
        ).rows
        warn_of_unseen_tools(config.rollout.environment, model.tokenizer, config.data.system_prompt)
        build_rollout_engines(group, model.config, config.rollout, config.engine.param_dtype)
    output_dir = Path(config.eval.output_dir)
    with (
        writer_lock(output_dir, key="eval.output_dir"),  # before anything is computed
        make_rewards(config.reward, build_reward_engines(config.reward, group, model.vision, rows)) as rewards,
        Rollouter(
            group,
            model.tokenizer,
            config.rollout,
            rewards,
            max_prompt_tokens=config.data.max_prompt_tokens,
            media_token_ids=model.media_token_ids,
        ) as rollouter,
    ):
        greedy = _collect(rollouter, rows, num_completions=1, temperature=0.0, seed=config.eval.seed)
        sampled = None
        if config.eval.num_samples > 1:
            sampled = _collect(
                rollouter,
                rows,
                num_completions=config.eval.num_samples,
                temperature=config.rollout.temperature,
                seed=config.eval.seed,
            )
        results = summarize(greedy, sampled, config.reward)
        for name in ("results.json", "config.yaml"):
            move_aside(output_dir / name)
        with SampleLog(output_dir) as log:
            for kind, groups in (("greedy", greedy), ("sampled", sampled or [])):
                log.append(
                    _row(kind, rollout, index, rollouter, config.reward)
                    for rollout in groups
                    for index in range(len(rollout.texts))
                )
        (output_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        write_json_atomic(output_dir / "results.json", {_MEASURED: _measured(config, model.folder), **results})
    _print(results, title=str(model.folder))
    return results


def _print(results: Mapping[str, Mapping[str, float]], *, title: str) -> None:
    """Prints a line for each data source, and one for all if there are several."""
    shown = {name: row for name, row in results.items() if name != "all" or len(results) > 2}
    rows = [
        [name, *(f"{value:.1%}" if isinstance(value, float) else value for value in row.values())]
        for name, row in shown.items()
    ]
    print_table(title, ["data source", *results["all"]], rows)


def greedy_accuracy(rollouter: Rollouter, examples: Sequence[Example], config: RewardConfig) -> Metrics:
    """Returns val/accuracy of greedy completions, over all rows and per data source."""
    groups = _collect(rollouter, examples, num_completions=1, temperature=0.0, seed=0)
    metrics: Metrics = {}
    for name, members in by_source(groups).items():
        correct = sum(is_correct(group.rewards[0], group.reward_parts[0], config) for group in members)
        key = "val/accuracy" if name == "all" else f"val/accuracy/{name}"
        metrics[key] = MetricValue.mean(correct, len(members))
    return metrics


def summarize(
    greedy: list[RolloutGroup], sampled: list[RolloutGroup] | None, config: RewardConfig
) -> dict[str, dict[str, float]]:
    """Returns the table of `evaluate`: data source -> metric -> value, with "all" last."""
    sampled_by_source = by_source(sampled or [])
    results: dict[str, dict[str, float]] = {}
    for name, groups in by_source(greedy).items():
        correct = [is_correct(group.rewards[0], group.reward_parts[0], config) for group in groups]
        results[name] = {"num_prompts": len(groups), "greedy_accuracy": sum(correct) / len(correct)}
        if sampled:
            results[name] |= _sampled_metrics(sampled_by_source[name], config)
    return results


def _sampled_metrics(groups: list[RolloutGroup], config: RewardConfig) -> dict[str, float]:
    """Returns pass@k, mean@n and maj@n, each as the mean over prompts."""
    num_samples = len(groups[0].texts)
    verdicts = [[is_correct(r, p, config) for r, p in zip(g.rewards, g.reward_parts, strict=True)] for g in groups]
    metrics = {f"mean@{num_samples}": sum(map(sum, verdicts)) / (num_samples * len(groups))}
    for k in sorted({*(2**power for power in range(num_samples.bit_length())), num_samples}):
        estimates = [pass_at_k(num_samples, sum(verdict), k) for verdict in verdicts]
        metrics[f"pass@{k}"] = sum(estimates) / len(estimates)
    majority = [majority_is_correct(g.answers, verdict) for g, verdict in zip(groups, verdicts, strict=True)]
    metrics[f"maj@{num_samples}"] = sum(majority) / len(majority)
    return metrics


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimates the probability that at least one of k completions is correct, without bias from n >= k of them:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_is_correct(answers: Sequence[str], correct: Sequence[bool]) -> bool:
    """Returns whether the most frequent final answer is correct; of equally frequent ones the first given counts."""
    settled = [final_answer(answer) for answer in answers]
    winner = Counter(settled).most_common(1)[0][0]
    return correct[settled.index(winner)]


def by_source(groups: Sequence[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
    """Returns the groups of each data source, sorted by name, and all of them under "all". A source named "all", as the
    rows of all.jsonl have, becomes "all (source)", and one named "measured" becomes "measured (source)"."""
    sources: defaultdict[str, list[RolloutGroup]] = defaultdict(list)
    for group in groups:
        name = group.example.data_source
        sources[f"{name} (source)" if name in _NO_SOURCES else name].append(group)
    return {**dict(sorted(sources.items())), "all": list(groups)}


def _collect(
    rollouter: Rollouter, examples: Sequence[Example], *, num_completions: int, temperature: float, seed: int
) -> list[RolloutGroup]:
    return rollouter.collect(
        examples, num_completions=num_completions, temperature=temperature, seed=seed, stream="evaluate"
    )


def _measured(config: EvalConfig, folder: Path) -> dict[str, Any]:
    """Returns config key -> value, with the folder that model.path led to. The temperature is that of the sampled
    completions; None if there are only greedy ones."""
    samples = config.eval.num_samples > 1
    return {
        "model.path": str(folder),
        "data.validation_files": config.data.validation_files,
        "data.max_validation_rows": config.data.max_validation_rows,
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "rollout.temperature": config.rollout.temperature if samples else None,
        "eval.num_samples": config.eval.num_samples,
        "eval.seed": config.eval.seed,
    }


def _row(kind: str, group: RolloutGroup, index: int, rollouter: Rollouter, config: RewardConfig) -> dict[str, Any]:
    return {
        "kind": kind,
        "uid": group.example.uid,
        "data_source": group.example.data_source,
        "prompt": rollouter.prompt_text(group.example, group.completions[index]),
        "completion": group.texts[index],
        "ground_truth": group.example.ground_truth,
        "reward": group.rewards[index],
        "reward_parts": group.reward_parts[index],
        "reward_failure": group.failures[index],
        "correct": is_correct(group.rewards[index], group.reward_parts[index], config),
        "finish_reason": group.completions[index].finish_reason,
        "logprobs": group.completions[index].logprobs,
    }
