"""Reinforcement learning: GRPO and its family, PPO with a critic, on-policy distillation."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from shardwise.config import (
    ConfigError,
    RLConfig,
    RolloutConfig,
    SglangRollout,
    SourceTeacherConfig,
    VllmRollout,
    allows_other_rows,
    longest_sequence,
)
from shardwise.controller.base import WorkerGroup
from shardwise.data import Loaded, PromptStream, prompt_examples
from shardwise.data.loader import steps_of
from shardwise.engine import named_failures
from shardwise.model_config import read_model_config
from shardwise.observability import Spans
from shardwise.recipes.build import OpenedModel, open_companion, open_model
from shardwise.recipes.engines import build_engine
from shardwise.recipes.evaluate import greedy_accuracy
from shardwise.recipes.learner import Engines, Learner
from shardwise.recipes.ranks import Ranks
from shardwise.recipes.reward_engines import build_reward_engines
from shardwise.recipes.run import Run, is_finished
from shardwise.recipes.sampling.environment import require_tool_tags, tool_schemas, warn_of_unseen_tools
from shardwise.recipes.sampling.pipeline import Pipeline
from shardwise.recipes.sampling.rollouter import Rollouter
from shardwise.recipes.sampling.sampled_tokens import TokenAccount
from shardwise.recipes.sampling.sampler import Sampler
from shardwise.recipes.sampling.samples import reward_metrics, rollout_metrics, sample_rows, staleness_metrics
from shardwise.recipes.sampling.sync_gate import SyncGate
from shardwise.recipes.sync import WeightSync
from shardwise.rewards import make_rewards
from shardwise.types import Example, Metrics, MetricValue, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """The models that read the policy's tokens, opened."""

    critic: OpenedModel | None = None
    """None: there is no critic, or it begins as the policy."""
    teachers: Sequence[OpenedModel] = ()

    @property
    def media_token_ids(self) -> frozenset[int]:
        """The tokens that stand for parts of images and videos to any of them."""
        opened = [*([] if self.critic is None else [self.critic]), *self.teachers]
        return frozenset(token_id for model in opened for token_id in model.media_token_ids)


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
    if is_finished("rl", config, total_steps=inputs.total_steps):
        return
    with _built(config, ranks, inputs) as parts:
        run, pipeline, weights = parts.run, parts.pipeline, parts.weight_sync
        sample_log = run.sample_log()
        weights.sync(run.first_step - 1)
        weights.probe(run.first_step - 1)
        pipeline.start(run.first_step)
        for step in run.steps():
            with run.spans("rollout"):
                rollout = pipeline.take(step)
            metrics = rollout.metrics | parts.learner.learn(rollout, step, run.spans)
            parts.token_account.add(metrics)
            validates = bool(parts.held_out) and run.should_validate(step)
            incidents: dict[str, float] = {}
            if validates or pipeline.takes_weights():
                with _serving(pipeline, step, run.spans, samples=validates):
                    with run.spans("sync"):
                        metrics |= weights.sync(step)
                    with run.spans("probe"):
                        metrics |= weights.probe(step)
                    if validates and config.reward is not None:
                        with run.spans("validate"):
                            metrics |= greedy_accuracy(parts.rollouter, parts.held_out, config.reward)
                    incidents = parts.ranks.take_restarts() | weights.shares
            with named_failures(run.output_dir):
                sample_log.append(
                    sample_rows(rollout.groups, step, parts.rollouter.prompt_text, judged=config.reward is not None)
                )
            is_split = parts.ranks.are_split
            metrics |= parts.counts | _rollout_metrics(rollout.groups, config, version=step - 1, is_split=is_split)
            if is_split:
                run.spans.add("rollout_idle", pipeline.take_idle_seconds())
            run.report(step, metrics, num_tokens=rollout.num_tokens, incidents=incidents)


def _open(config: RLConfig) -> _Inputs:
    """Reads the data, and everything about the models but their weights."""
    model = open_model(config.model)
    model.context.require(*longest_sequence(config))
    require_tool_tags(config.rollout.environment, model.tokenizer)
    model.require_media_banned(config.rollout)
    if config.data.apply_chat_template:
        model.warn_of_endless_turns(config.rollout)
    companions = open_companions(config, model)
    rollout = without_media(config.rollout, model, companions)
    media_token_ids = companions.media_token_ids.union(model.media_token_ids)
    examples, held_out = _read_data(config, model, media_token_ids)
    warn_of_unseen_tools(config.rollout.environment, model.tokenizer, config.data.system_prompt)
    sources = [example.data_source for example in examples.rows]
    require_teachers(config.teachers, sources)
    rows_may_differ = allows_other_rows(config.trainer.resume_allow)
    stream = PromptStream(sources, config.data, seed=config.trainer.seed, rows_may_differ=rows_may_differ)
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
    reward_models = {} if config.reward is None else build_reward_engines(config.reward, ranks.trainers)
    sync_gate: SyncGate | None = None
    if config.rollout.partial and config.rollout.split is not None:
        sync_gate = SyncGate(ranks.interrupt_sampling, timeout_seconds=config.rollout.split.timeout_seconds)
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
            "rl",
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


def open_companions(config: RLConfig, policy: OpenedModel) -> Companions:
    """Opens the companions. Raises as `open_companion`."""
    keys, num_tokens = longest_sequence(config)
    open_other = partial(open_companion, main=policy, keys=keys, num_tokens=num_tokens)
    critic = None if config.critic is None else config.critic.model
    return Companions(
        critic=None if critic is None else open_other(critic),
        teachers=[open_other(teacher.model) for teacher in config.teachers],
    )


def without_media(rollout: RolloutConfig, policy: OpenedModel, companions: Companions) -> RolloutConfig:
    """Returns the rollout config with the companions' media tokens banned too; the engine bans the policy's itself.

    Raises:
        ConfigError: the engine may draw them.
    """
    vocab_size = read_model_config(policy.folder).get_text_config().vocab_size
    others = companions.media_token_ids.difference(policy.media_token_ids, rollout.bad_token_ids)
    banned = sorted(token_id for token_id in others if token_id < vocab_size)
    if not banned:
        return rollout
    engine = rollout.engine
    if isinstance(engine, SglangRollout) or (isinstance(engine, VllmRollout) and rollout.temperature != 1):
        raise ConfigError(
            f"{policy.tokenizer.convert_ids_to_tokens(banned[0])} stands for parts of images to critic.model or a "
            f"teacher, and engine={engine.type} with rollout.temperature={rollout.temperature:g} gives logprobs of the "
            "policy only if it may draw every token; use rollout.engine=embedded, or vllm with rollout.temperature=1"
        )
    return rollout.model_copy(update={"bad_token_ids": [*rollout.bad_token_ids, *banned]})


def _read_data(
    config: RLConfig, model: OpenedModel, media_token_ids: Collection[int]
) -> tuple[Loaded[Example], list[Example]]:
    """Reads the rows to train on, with their counts, and those to validate on."""
    data, tools = config.data, tool_schemas(config.rollout.environment)
    vision = None if config.teachers else model.vision_in(config.rollout)
    read = partial(
        prompt_examples,
        data,
        tokenizer=model.tokenizer,
        tools=tools,
        vision=vision,
        media_token_ids=media_token_ids,
        is_judged=config.reward is not None,
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
            f"teachers have the data_source {_listed(named)}, but there are training rows from "
            f"{_listed(there - named)}; add a teacher for them, or one without data_source, which teaches all others"
        )
    idle = {*(named - there), *(["null"] if has_default and there <= named else [])}
    if idle:
        raise ConfigError(
            f"the teacher with data_source={_listed(idle)} has no training rows to teach, which are from "
            f"{_listed(there)}; remove it"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def build_engines(
    config: RLConfig,
    model: OpenedModel,
    group: WorkerGroup,
    total_steps: int,
    companions: Companions,
) -> Engines:
    """Builds an engine for every model that the algorithm needs.

    Args:
        model: the policy.
        companions: the companions that the config names.
    """
    algorithm, temperature, seed = config.algorithm, config.rollout.temperature, config.trainer.seed
    num_waiting = 0 if config.critic is None else config.critic.critic_warmup_steps
    if config.critic is not None:
        try:
            config.critic.require_policy_steps(total_steps)
        except ValueError as error:  # how many steps an epoch has is known only here
            raise ConfigError(str(error)) from None
    policy = build_engine(
        group,
        "policy",
        model.config,
        config.engine,
        optimizer=config.trainer.optimizer_config(),
        total_steps=(total_steps - num_waiting) * algorithm.num_updates,
        seed=seed,
        temperature=temperature,
    )
    policy.use_loss("policy", algorithm, kl_coef=algorithm.kl_coef)
    engines = Engines(policy)
    if algorithm.kl_coef > 0 and config.engine.lora is None:  # else the reference is the policy without its adapter
        engines.reference = build_engine(
            group, "reference", model.config, config.reference_layout(), temperature=temperature
        )
    if config.critic is not None:
        engines.critic = build_engine(
            group,
            "critic",
            (model if companions.critic is None else companions.critic).config,
            config.critic_layout(),
            head="token_values",
            optimizer=config.critic.optimizer,
            optimizer_key="critic.optimizer",
            total_steps=total_steps * algorithm.num_updates,
            seed=seed,
        )
        engines.critic.use_loss("value", config.critic)
    for number, (teacher, opened) in enumerate(zip(config.teachers, companions.teachers, strict=True)):
        engines.teachers[teacher.data_source] = build_engine(
            group,
            f"teacher {number}",
            opened.config,
            config.teacher_layout(teacher),
            temperature=temperature,
        )
    return engines
