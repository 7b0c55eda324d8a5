"""Reinforcement learning: GRPO and its family, PPO with a critic, on-policy distillation."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from shardwise.config import (
    ConfigError,
    RLConfig,
    RolloutConfig,
    SourceTeacherConfig,
    allows_other_rows,
    longest_sequence,
)
from shardwise.controller.base import WorkerGroup
from shardwise.controller.watchdog import go_on
from shardwise.data import Loaded, PromptStream, prompt_examples
from shardwise.data.loader import steps_of
from shardwise.engine import named_failures
from shardwise.observability import Spans
from shardwise.recipes.evaluate import greedy_accuracy
from shardwise.recipes.learner import Learner
from shardwise.recipes.opened_model import OpenedModel, open_model, shared_vision
from shardwise.recipes.placement import Ranks
from shardwise.recipes.reward_engines import build_reward_engines
from shardwise.recipes.rl_models import Companions, build_engines, open_companions, without_media
from shardwise.recipes.run import Run, is_finished
from shardwise.recipes.sampling.environment import require_tool_tags, tool_schemas, warn_of_unseen_tools
from shardwise.recipes.sampling.pipeline import Pipeline
from shardwise.recipes.sampling.rollouter import Rollouter
from shardwise.recipes.sampling.sampled_tokens import TokenAccount
from shardwise.recipes.sampling.sampler import Sampler
from shardwise.recipes.sampling.samples import reward_metrics, rollout_metrics, sample_rows, staleness_metrics
from shardwise.recipes.sampling.sync_gate import SyncGate
from shardwise.recipes.weight_sync import WeightSync
from shardwise.rewards import make_rewards
from shardwise.types import Example, Metrics, MetricValue, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What a run is built from: data that was read, and models without their weights."""

    model: OpenedModel
    """The policy."""
    companions: Companions
    rollout: RolloutConfig
    """Also bans the tokens that stand for parts of images to a companion."""
    examples: Loaded[Example]
    held_out: list[Example]
    stream: PromptStream
    total_steps: int

    @property
    def media_token_ids(self) -> frozenset[int]:
        """The media tokens of every model."""
        return self.companions.media_token_ids.union(self.model.media_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Everything a run holds when it is ready for its first step."""

    run: Run
    ranks: Ranks
    learner: Learner
    pipeline: Pipeline
    rollouter: Rollouter
    weight_sync: WeightSync
    token_account: TokenAccount
    held_out: list[Example]
    counts: Metrics
    """Counts of the rows that were read."""


def train(config: RLConfig, group: WorkerGroup) -> None:
    """Runs the whole recipe. One step consumes `rollout.num_prompts` groups and makes num_minibatches x num_epochs
    optimizer steps.

    Args:
        group: every rank; the last ones only sample where rollout.placement=split.
    """
    ranks, inputs = Ranks.of(group, config), _open(config)
    if is_finished(config, total_steps=inputs.total_steps):
        return
    with _built(config, ranks, inputs) as parts:
        run, pipeline = parts.run, parts.pipeline
        sample_log = run.sample_log()
        parts.weight_sync.sync(run.first_step - 1)
        parts.weight_sync.probe(run.first_step - 1)
        pipeline.start(run.first_step)
        for step in run.steps():
            with run.spans("rollout"):
                rollout = pipeline.take(step)
            metrics = rollout.metrics | parts.learner.learn(rollout, step, run.spans)
            parts.token_account.add(metrics)
            of_engines, incidents = _serve_new_weights(config, parts, step)
            with named_failures(run.output_dir):
                sample_log.append(
                    sample_rows(rollout.groups, step, parts.rollouter.prompt_text, judged=config.reward is not None)
                )
            metrics |= of_engines | parts.counts
            metrics |= _rollout_metrics(rollout.groups, config, version=step - 1, is_split=ranks.are_split)
            if ranks.are_split:
                run.spans.add("rollout_idle", pipeline.take_idle_seconds())
            run.report(step, metrics, num_tokens=rollout.num_tokens, incidents=incidents)


def _serve_new_weights(config: RLConfig, parts: _Parts, step: int) -> tuple[Metrics, dict[str, float]]:
    """Has the rollout engines serve the weights of a step, unless they are better left to sample, and validates with
    them if that is due.

    Returns:
        Metrics, and the incidents that `Run.report` takes.
    """
    run, weight_sync = parts.run, parts.weight_sync
    validates = bool(parts.held_out) and run.should_validate(step)
    if not validates and not parts.pipeline.takes_weights():
        return {}, {}
    with _serving(parts.pipeline, step, run.spans, samples=validates):
        with run.spans("sync"):
            metrics = weight_sync.sync(step)
        with run.spans("probe"):
            metrics |= weight_sync.probe(step)
        if validates and config.reward is not None:
            with run.spans("validate"):
                metrics |= greedy_accuracy(parts.rollouter, parts.held_out, config.reward)
        return metrics, parts.ranks.take_restarts() | weight_sync.shares


def _open(config: RLConfig) -> _Inputs:
    """Reads the data, and everything about the models but their weights."""
    model = open_model(config.model)
    model.context.require(*longest_sequence(config))
    require_tool_tags(config.rollout.environment, model.tokenizer)
    model.require_visible_stops(config.rollout)
    if config.data.apply_chat_template:
        model.warn_of_endless_turns(config.rollout)
    companions = open_companions(config, model)
    for one in (model, *companions.by_key.values()):
        one.warn_of_refused_images()
    rollout = without_media(config.rollout, model, companions)
    examples, held_out = _read_data(config, model, companions)
    warn_of_unseen_tools(config.rollout.environment, model.tokenizer, config.data.system_prompt)
    sources = [example.data_source for example in examples.rows]
    require_teachers(config.teachers, sources)
    rows_may_differ = allows_other_rows(config.trainer.resume_allow)
    stream = PromptStream(
        sources,
        config.data,
        seed=config.trainer.seed,
        digest=examples.digest(),
        rows_may_differ=rows_may_differ,
    )
    total_steps = config.trainer.total_steps or steps_of(
        config.trainer.num_epochs, num_rows=len(examples.rows), batch_size=config.rollout.num_prompts
    )
    return _Inputs(
        model=model,
        companions=companions,
        rollout=rollout,
        examples=examples,
        held_out=held_out,
        stream=stream,
        total_steps=total_steps,
    )


@contextmanager
def _built(config: RLConfig, ranks: Ranks, inputs: _Inputs) -> Iterator[_Parts]:
    """Builds every engine, and continues the run in the output folder if there is one."""
    model, examples, total_steps = inputs.model, inputs.examples, inputs.total_steps
    engines = build_engines(config, model, ranks.trainers, total_steps, inputs.companions)
    ranks.build_rollout(model.config, config.model_copy(update={"rollout": inputs.rollout}))
    learner = Learner(engines, config)
    reward_models = {}
    if config.reward is not None:
        judged = [*examples.rows, *inputs.held_out]
        reward_models = build_reward_engines(config.reward, ranks.trainers, model.vision, judged)
    sync_gate = _sync_gate(config, ranks)
    with (
        nullcontext() if config.reward is None else make_rewards(config.reward, reward_models) as rewards,
        Rollouter(
            ranks.rollouts,
            model.tokenizer,
            config.rollout,
            rewards,
            max_prompt_tokens=config.data.max_prompt_tokens,
            media_token_ids=inputs.media_token_ids,
            sync_gate=sync_gate,
        ) as rollouter,
        Pipeline(
            Sampler(rollouter, inputs.stream, examples.rows, config),
            inputs.stream,
            total_steps=total_steps,
            max_staleness=config.rollout.max_staleness if ranks.are_split else None,
            sync_gate=sync_gate,
        ) as pipeline,
        Run(
            config,
            parts={"learner": learner, "pipeline": pipeline},
            engines=engines.saved,
            frozen=[*engines.frozen, *(model.engine for model in reward_models.values())],
            total_steps=total_steps,
        ) as run,
        TokenAccount("rl") as token_account,
    ):
        yield _Parts(
            run=run,
            ranks=ranks,
            learner=learner,
            pipeline=pipeline,
            rollouter=rollouter,
            weight_sync=WeightSync(
                engines.policy,
                ranks,
                examples.rows,
                probe_every_syncs=config.rollout.probe_every_syncs,
                image_token_id=None if model.vision is None else model.vision.image_token_id,
            ),
            token_account=token_account,
            held_out=inputs.held_out,
            counts={f"data/{name}": MetricValue.max(count) for name, count in examples.counts.items()},
        )


def _sync_gate(config: RLConfig, ranks: Ranks) -> SyncGate | None:
    """Returns what lets new weights interrupt rollouts in flight; None: weights wait for them."""
    if not config.rollout.partial or config.rollout.split is None:
        return None
    return SyncGate(ranks.interrupt_sampling, timeout_seconds=config.rollout.split.timeout_seconds)


@contextmanager
def _serving(pipeline: Pipeline, step: int, spans: Spans, *, samples: bool) -> Iterator[None]:
    """`Pipeline.serving`, with the wait for rollouts in flight counted in the span `rollout`, not in `sync`."""
    with ExitStack() as stack:
        with spans("rollout"):
            stack.enter_context(pipeline.serving(step, samples=samples))
        yield


def _rollout_metrics(groups: Sequence[RolloutGroup], config: RLConfig, *, version: int, is_split: bool) -> Metrics:
    """Returns the metrics of what a step trains on.

    Args:
        version: the version of the weights that the step begins with.
        is_split: ranks of their own sample it, maybe with earlier weights.
    """
    found = rollout_metrics(groups)
    if is_split:
        found |= staleness_metrics(groups, version=version)
    if config.reward is not None:
        found |= reward_metrics(groups, mask_failed=config.masks_failed)
    return found


def _read_data(config: RLConfig, model: OpenedModel, companions: Companions) -> tuple[Loaded[Example], list[Example]]:
    """Reads the rows to train on, with their counts, and those to validate on."""
    data, tools = config.data, tool_schemas(config.rollout.environment)
    read = partial(
        prompt_examples,
        data,
        tokenizer=model.tokenizer,
        tools=tools,
        vision=shared_vision(model.vision_in(config.rollout), companions.by_key),
        media_token_ids=companions.media_token_ids.union(model.media_token_ids),
        is_judged=config.reward is not None,
        on_row=go_on,
    )
    examples = read(data.train_files, max_rows=data.max_train_rows)
    held_out = read(data.validation_files, max_rows=data.max_validation_rows).rows if data.validation_files else []
    return examples, held_out


def require_teachers(teachers: Sequence[SourceTeacherConfig], sources: Sequence[str]) -> None:
    """Checks that every training row has a teacher, and that every teacher has rows.

    Raises:
        ConfigError: names the sources that have none, or the teachers that have nothing to teach.
    """
    if not teachers:
        return
    named = {teacher.data_source for teacher in teachers if teacher.data_source is not None}
    has_default, there = len(named) < len(teachers), set(sources)
    if there - named and not has_default:
        raise ConfigError(
            f"teachers have the data_source {_in_order(named)}, but there are training rows from "
            f"{_in_order(there - named)}; add a teacher for them, or one without data_source, which teaches all others"
        )
    idle = {*(named - there), *(["null"] if has_default and there <= named else [])}
    if idle:
        raise ConfigError(
            f"the teacher with data_source={_in_order(idle)} has no training rows to teach, which are from "
            f"{_in_order(there)}; remove it"
        )


def _in_order(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
