"""The models of a run of reinforcement learning: opened, held to each other, and built as engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shardwise.config import ConfigError, RLConfig, RolloutConfig, SglangRollout, frozen_layout, longest_sequence
from shardwise.controller.base import WorkerGroup
from shardwise.model_config import read_model_config
from shardwise.recipes.engine_source import EngineSource
from shardwise.recipes.engines import RemoteEngine, build_engine
from shardwise.recipes.learner import Engines
from shardwise.recipes.opened_model import OpenedModel, open_companion


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """The models that read the policy's tokens, opened."""

    critic: OpenedModel | None = None
    """None: there is no critic, or it begins as the policy."""
    teachers: Sequence[OpenedModel] = ()

    @property
    def by_key(self) -> dict[str, OpenedModel]:
        """Config key -> the model that it names."""
        teachers = {f"teachers.{number}.model": teacher for number, teacher in enumerate(self.teachers)}
        return teachers if self.critic is None else {"critic.model": self.critic, **teachers}

    @property
    def media_token_ids(self) -> frozenset[int]:
        """The tokens that stand for parts of images and videos to any of them."""
        return frozenset(token_id for model in self.by_key.values() for token_id in model.media_token_ids)


def open_companions(config: RLConfig, policy: OpenedModel) -> Companions:
    """Opens the companions. Raises as `open_companion`."""
    said, num_tokens = longest_sequence(config)
    open_other = partial(open_companion, main=policy, said=said, num_tokens=num_tokens)
    critic = None if config.critic is None else config.critic.model
    return Companions(
        critic=None if critic is None else open_other(critic),
        teachers=[open_other(teacher.model) for teacher in config.teachers],
    )


def without_media(rollout: RolloutConfig, policy: OpenedModel, companions: Companions) -> RolloutConfig:
    """Returns the rollout config with the companions' media tokens banned too; the engine bans the policy's itself.
    SGLang, which bans none, samples from a policy that sees images all the same: there no row has any.

    Raises:
        ConfigError: the engine may draw tokens that stand for images, which could not be trained on.
    """
    vocab_size = read_model_config(policy.folder).get_text_config().vocab_size
    own, engine = policy.media_token_ids, rollout.engine
    others = companions.media_token_ids.difference(own, rollout.bad_token_ids)
    banned = sorted(token_id for token_id in others if token_id < vocab_size)
    if engine.may_ban_tokens(rollout.temperature):
        return rollout.model_copy(update={"bad_token_ids": [*rollout.bad_token_ids, *banned]})
    drawn = banned if isinstance(engine, SglangRollout) else [*own, *banned]
    if drawn:
        token, whose = drawn[0], "the policy" if drawn[0] in own else "critic.model or a teacher"
        raise ConfigError(
            f"{policy.tokenizer.convert_ids_to_tokens(token)} stands for parts of images to {whose}, and "
            f"engine={engine.type} with rollout.temperature={rollout.temperature:g} gives logprobs of the policy only "
            "if it may draw every token; use rollout.engine=embedded, or vllm with rollout.temperature=1"
        )
    return rollout


def build_engines(
    config: RLConfig, model: OpenedModel, group: WorkerGroup, total_steps: int, companions: Companions
) -> Engines:
    """Builds an engine for every model that the algorithm needs.

    Args:
        model: the policy.
        total_steps: steps of the run.
        companions: the companions that the config names.
    Raises:
        ConfigError: the run has too few steps for critic.critic_warmup_steps.
    """
    temperature = config.rollout.temperature
    if config.critic is not None:
        try:
            config.critic.require_policy_steps(total_steps)
        except ValueError as error:  # how many steps an epoch has is known only here
            raise ConfigError(str(error)) from None
    engines = Engines(_build_policy(config, model, group, total_steps))
    if config.algorithm.kl_coef > 0 and config.engine.lora is None:  # else it is the policy without its adapter
        layout = frozen_layout(config.reference, config.engine)
        source = EngineSource(model=model.config, layout=layout, temperature=temperature)
        engines.reference = build_engine(group, "reference", source)
    if config.critic is not None:
        critic = model if companions.critic is None else companions.critic
        engines.critic = _build_critic(config, critic, group, total_steps)
    for number, (teacher, opened) in enumerate(zip(config.teachers, companions.teachers, strict=True)):
        source = EngineSource(model=opened.config, layout=teacher.layout(config.engine), temperature=temperature)
        engines.teachers[teacher.data_source] = build_engine(group, f"teacher {number}", source)
    return engines


def _build_policy(config: RLConfig, model: OpenedModel, group: WorkerGroup, total_steps: int) -> RemoteEngine:
    num_waiting = 0 if config.critic is None else config.critic.critic_warmup_steps
    policy = build_engine(
        group,
        "policy",
        EngineSource(
            model=model.config,
            layout=config.engine,
            seed=config.trainer.seed,
            temperature=config.rollout.temperature,
        ),
        optimizer=config.trainer.optimizer_config(),
        total_steps=(total_steps - num_waiting) * config.algorithm.num_updates,
    )
    policy.use_loss("policy", config.algorithm, kl_coef=config.algorithm.kl_coef)
    return policy


def _build_critic(config: RLConfig, model: OpenedModel, group: WorkerGroup, total_steps: int) -> RemoteEngine:
    assert config.critic is not None
    critic = build_engine(
        group,
        "critic",
        EngineSource(
            model=model.config,
            layout=config.critic.layout(config.engine),
            head="token_values",
            seed=config.trainer.seed,
        ),
        optimizer=config.critic.optimizer,
        optimizer_key="critic.optimizer",
        total_steps=total_steps * config.algorithm.num_updates,
    )
    critic.use_loss("value", config.critic)
    return critic
