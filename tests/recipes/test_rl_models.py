"""Which engines a run of reinforcement learning has, and which tokens it never draws."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from shardwise.config import (
    AlgorithmConfig,
    ConfigError,
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    RLConfig,
    RolloutConfig,
)
from shardwise.recipes import rl_models
from shardwise.recipes.losses import LossSource
from shardwise.recipes.opened_model import open_model
from shardwise.recipes.rl_models import Companions, build_engines, open_companions, without_media


def config(*, tree=None, **algorithm) -> RLConfig:
    whole = {
        "model": {"path": "m"},
        "data": {"train_files": "t.jsonl", "max_prompt_tokens": 100},
        "reward": {"functions": "a:b"},
        "algorithm": algorithm,
        "engine": {"max_tokens_per_micro_batch": 512, "ulysses_size": 2},
        "rollout": {"temperature": 0.6},
        "trainer": {"learning_rate": 0.125, "seed": 3},
    }
    return RLConfig.parse(whole | (tree or {}), origin="test")


@pytest.fixture
def built(fake_group, monkeypatch):
    """(engines, group): what was built for a config, in a run of 10 steps on 2 ranks."""

    def opened(model, *, main, said, num_tokens):
        assert (main.config.path, num_tokens) == ("m", 100 + 256)
        return SimpleNamespace(config=ModelConfig(path=f"opened {model.path}"))

    monkeypatch.setattr(rl_models, "open_companion", opened)

    def build(settings):
        sizes = {"policy": 7_000_000, "critic": 5_000_000}
        group = fake_group(2, build_engine=lambda rank, role, *_: (sizes.get(role, 9), sizes.get(role, 0), 100 + rank))
        model = SimpleNamespace(config=ModelConfig(path="m"))
        return build_engines(settings, model, group, 10, open_companions(settings, model)), group

    return build


def engines_of(group):
    """By role: (model, layout, head, optimizer or None, steps of the schedule, seed, temperature)."""
    calls = [call[1:] for call in group.calls if call[0] == "build_engine"]
    found = {}
    for role, sent, *trained in calls:
        source = json.loads(sent)
        optimizer, total_steps, with_trained = trained or (None, 1, True)
        assert with_trained == (optimizer is None), "trained weights may be those of a checkpoint"
        found[role] = (
            source["model"]["path"],
            source["layout"],
            source["head"],
            None if optimizer is None else OptimizerConfig.model_validate_json(optimizer),
            total_steps,
            source["seed"],
            source["temperature"],
        )
    return found


LORA = {"engine": {"max_tokens_per_micro_batch": 512, "lora": {"rank": 4}}}
GAE = {"tree": {"critic": {}}, "advantage": "gae"}


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, ["policy"]),
        ({"kl_coef": 0.1}, ["policy", "reference"]),
        ({"kl_coef": 0.1, "kl_in": "reward"}, ["policy", "reference"]),
        ({"kl_coef": 0.1, "tree": LORA}, ["policy"]),
        (GAE, ["policy", "critic"]),
        (GAE | {"kl_coef": 0.1}, ["policy", "reference", "critic"]),
        (
            {"advantage": "distill", "tree": {"teachers": [{"model": {"path": "t"}, "data_source": "a"},
                                                             {"model": {"path": "u"}}]}},
            ["policy", "teacher 0", "teacher 1"],
        ),
    ],
)  # fmt: skip
def test_engines_are_those_that_the_algorithm_needs(built, settings, roles):
    engines, group = built(config(**settings))
    assert list(engines_of(group)) == roles
    assert sorted(engine.role for engine in (*engines.saved.values(), *engines.frozen)) == sorted(roles)
    assert (engines.reference is None) == ("reference" not in roles)
    assert (engines.critic is None) == ("critic" not in roles)
    assert {source: engine.role for source, engine in engines.teachers.items()} == (
        {"a": "teacher 0", None: "teacher 1"} if "teacher 0" in roles else {}
    )


def test_the_policy_is_trained_and_its_schedule_counts_optimizer_steps(built):
    settings = config(num_minibatches=2, num_epochs=3)
    engines, group = built(settings)
    assert engines_of(group)["policy"] == (
        *("m", settings.engine.model_dump(mode="json"), "logprobs", settings.trainer.optimizer_config()),
        *(60, 3, 0.6),
    )
    assert engines.policy.size == "7.0M parameters"
    assert engines.policy.num_bytes_read == 101
    assert engines.policy.source.layout == settings.engine


def test_the_reference_is_the_policys_model_frozen_in_its_own_layout(built):
    _, group = built(config(kl_coef=0.1))
    model, layout, head, optimizer, *_, temperature = engines_of(group)["reference"]
    assert (model, head, optimizer, temperature) == ("m", "logprobs", None, 0.6)
    assert (layout["strategy"], layout["ulysses_size"]) == ("fsdp2_infer", 2)
    _, group = built(config(kl_coef=0.1, tree={"reference": {"max_tokens_per_micro_batch": 600}}))
    assert engines_of(group)["reference"][1]["max_tokens_per_micro_batch"] == 600


def test_the_critic_has_a_head_an_optimizer_and_a_layout_of_its_own(built):
    settings = config(**GAE, num_minibatches=2)
    _, group = built(settings)
    assert engines_of(group)["critic"] == (
        "m", settings.engine.model_dump(mode="json"), "token_values", OptimizerConfig(), 20, 3, 1.0
    )  # fmt: skip
    critic = {
        "model": {"path": "c"},
        "optimizer": {"learning_rate": 0.5},
        "engine": {"max_tokens_per_micro_batch": 700},
        "value_loss": {"clip": 0.25},
    }
    _, group = built(config(advantage="gae", num_epochs=2, tree={"critic": critic}))
    model, layout, head, optimizer, *_ = engines_of(group)["critic"]
    assert (model, head, layout["max_tokens_per_micro_batch"]) == ("opened c", "token_values", 700)
    assert optimizer == OptimizerConfig(learning_rate=0.5)
    (bound,) = [call for call in group.calls if call[:2] == ("use_loss", "critic")]
    source = LossSource.model_validate_json(bound[2])
    assert (source.kind, source.numbers) == ("value", {})
    assert CriticConfig.model_validate_json(source.config).value_loss.clip == 0.25


def test_a_critic_beside_adapters_has_none_itself(built):
    _, group = built(config(advantage="gae", tree=LORA | {"critic": {}}))
    assert engines_of(group)["policy"][1]["lora"]["rank"] == 4
    assert engines_of(group)["critic"][1]["lora"] is None


def test_teachers_are_frozen_models_of_their_own_at_the_policys_temperature(built):
    teachers = [{"model": {"path": "t"}, "engine": {"max_tokens_per_micro_batch": 800}}]
    _, group = built(config(advantage="distill", tree={"teachers": teachers}))
    model, layout, head, optimizer, *_, temperature = engines_of(group)["teacher 0"]
    assert (model, head, optimizer, temperature) == ("opened t", "logprobs", None, 0.6)
    assert (layout["strategy"], layout["max_tokens_per_micro_batch"]) == ("fsdp2_infer", 800)


def test_the_policys_loss_is_bound_with_the_coefficient(built):
    settings = config(kl_coef=0.25)
    _, group = built(settings)
    ((_, role, sent),) = [call for call in group.calls if call[0] == "use_loss"]
    source = LossSource.model_validate_json(sent)
    assert (role, source.kind, source.numbers) == ("policy", "policy", {"kl_coef": 0.25})
    assert AlgorithmConfig.model_validate_json(source.config) == settings.algorithm


@pytest.mark.parametrize(
    ("rollout", "is_refused"),
    [
        ({"engine": "vllm"}, False),
        ({"engine": "vllm", "temperature": 0.7}, True),
        ({"engine": "sglang"}, True),
        ({"temperature": 0.7}, False),
    ],
)
def test_engines_that_cannot_leave_them_out_are_refused(media_folder, rollout, is_refused):
    blind, critic = (open_model(ModelConfig(path=media_folder(name))) for name in ("blind", "critic"))
    settings = RolloutConfig(**rollout)
    assert without_media(settings, blind, Companions()) == settings
    with pytest.raises(ConfigError) if is_refused else nullcontext() as error:
        without_media(settings, blind, Companions(teachers=[critic]))
    if is_refused:
        assert str(error.value).startswith(
            f"6 stands for parts of images to critic.model or a teacher, and engine={rollout['engine']} with "
            f"rollout.temperature={settings.temperature:g} gives logprobs of the policy only if it may draw every token"
        )


@pytest.mark.parametrize(
    ("rollout", "is_refused"),
    [
        ({"engine": "vllm"}, False),
        ({"engine": "vllm", "temperature": 0.7}, True),
        ({"engine": "sglang"}, False),
        ({"temperature": 0.7}, False),
    ],
)
def test_engines_ban_what_stands_for_images_to_the_policy_themselves(media_folder, rollout, is_refused):
    policy, settings = open_model(ModelConfig(path=media_folder("policy"))), RolloutConfig(**rollout)
    for companions in (Companions(), Companions(critic=policy)):
        with pytest.raises(ConfigError) if is_refused else nullcontext() as error:
            assert without_media(settings, policy, companions) == settings
        if is_refused:
            assert str(error.value) == (
                "1 stands for parts of images to the policy, and engine=vllm with rollout.temperature=0.7 gives "
                "logprobs of the policy only if it may draw every token; use rollout.engine=embedded, or vllm with "
                "rollout.temperature=1"
            )
