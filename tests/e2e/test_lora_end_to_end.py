"""Adapters as a user trains them: `shardwise sft` and `rl` with engine.lora, then `export`, `eval`, peft itself."""

import json
import shutil

import pytest
import torch
from sharded_lora import needs_integer_shards
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.preference_problems import preference_problems

SFT_STEPS, RL_STEPS = 3, 3


@pytest.fixture(scope="module")
def sft(assets, job, tmp_path_factory):
    """On two ranks that share their sequences, layers computed twice, adapters saved alone."""
    folder = tmp_path_factory.mktemp("lora") / "sft"
    done = job(
        *[2, "sft", f"model.path={assets.model}", f"data.train_files={assets.sft}"],
        *["data.max_sequence_tokens=64", f"trainer.output_dir={folder}", f"trainer.total_steps={SFT_STEPS}"],
        *["trainer.batch_size=8", "trainer.learning_rate=1e-2", "trainer.tensorboard=false"],
        *["engine.lora={rank: 4, alpha: 16, use_dora: true, save_merged: false}", "engine.ulysses_size=2"],
        *["engine.activation_checkpointing=full", "engine.apply_tiled_mlp=true"],
    )
    assert done.code == 0, done.err
    assert "(4.61K trained) on 2 ranks" in done.out
    return folder


def test_only_the_adapter_is_saved_and_commands_say_how_to_merge_it(sft, assets, command):
    checkpoint = sft / "checkpoints" / f"step_{SFT_STEPS}"
    assert {path.name for path in checkpoint.iterdir()} == {"adapter", "state", "manifest.json"}
    config = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["use_dora"], config["base_model_name_or_path"]) == (4, True, str(assets.model))
    done = command(
        "eval", f"model.path={sft}", f"data.validation_files={assets.rl}", f"reward.functions={assets.reward}"
    )
    assert done.code == 2
    assert (
        f"holds an adapter and no whole model (engine.lora.save_merged=false); merge them with `shardwise export {sft}"
        in (done.err)
    )


def test_f31_exported_model_is_what_peft_makes_of_base_and_adapter(sft, assets, job, tmp_path):
    from peft import PeftModel

    done = job(2, "export", str(sft), str(tmp_path / "merged"), "--dtype", "float32")
    assert done.code == 0, done.err
    base = AutoModelForCausalLM.from_pretrained(assets.model, dtype=torch.float32)
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = PeftModel.from_pretrained(base, sft / "checkpoints" / f"step_{SFT_STEPS}" / "adapter").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert merged.keys() == start.keys()
    for name, tensor in adapted.state_dict().items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-5)
    moved = [name for name in start if not torch.equal(start[name], merged[name])]
    assert all("_proj." in name for name in moved)
    assert len(moved) == 14, "seven linear layers in each of two layers"


@pytest.mark.parametrize(
    ("recipe", "lora"),
    [
        ("preference", "{rank: 4}"),
        pytest.param("preference", "{rank: 4, quantize_base: nf4}", marks=needs_integer_shards),
        ("reward-model", "{rank: 4}"),
        pytest.param("reward-model", "{rank: 4, quantize_base: nf4}", marks=needs_integer_shards),
    ],
)
def test_an_exported_adapter_is_the_model_that_was_saved_beside_it(assets, command, tmp_path, recipe, lora):
    """File by file: on the base as it was trained on, with the reward model's head, and with the token that the chat
    template ends turns with among those that end completions."""
    pairs = preference_problems(tmp_path / "pairs", seed=0, num_held_out=8).pairs_train
    base = shutil.copytree(assets.model, tmp_path / "base")
    GenerationConfig(eos_token_id=0).save_pretrained(base)
    trained = command(
        *[recipe, f"model.path={base}", f"data.train_files={pairs}", "data.max_sequence_tokens=64"],
        *["data.max_train_rows=16", "trainer.batch_size=8", "trainer.total_steps=2", "trainer.learning_rate=1e-2"],
        *["trainer.tensorboard=false", f"trainer.output_dir={tmp_path / 'run'}", f"engine.lora={lora}"],
    )
    assert trained.code == 0, trained.err
    checkpoint = tmp_path / "run" / "checkpoints" / "step_2"
    out = tmp_path / "out"
    done = command("export", str(checkpoint / "adapter"), str(out))
    assert done.code == 0, done.err
    files = {path.name: path.read_bytes() for path in (checkpoint / "hf").iterdir()}
    assert files.keys() == {path.name for path in out.iterdir()}
    for name, content in files.items():
        assert (out / name).read_bytes() == content, name
    if recipe == "preference":
        assert json.loads(files["generation_config.json"])["eos_token_id"] == [0, 1]


@needs_integer_shards
def test_an_adapter_of_a_base_in_4_bits_does_not_go_on_over_a_whole_one(assets, command, tmp_path):
    options = [
        *["sft", f"model.path={assets.model}", f"data.train_files={assets.sft}", "data.max_sequence_tokens=64"],
        *["data.max_train_rows=8", "trainer.batch_size=4", "trainer.total_steps=1", "trainer.tensorboard=false"],
    ]
    lora = "rank: 2, save_merged: false"
    first = command(*options, f"trainer.output_dir={tmp_path / 'a'}", f"engine.lora={{{lora}, quantize_base: nf4}}")
    assert first.code == 0, first.err
    adapter = tmp_path / "a" / "checkpoints" / "step_1" / "adapter"
    lora = f"{lora}, adapter_path: {adapter}"
    done = command(*options, f"trainer.output_dir={tmp_path / 'b'}", f"engine.lora={{{lora}}}")
    assert done.code == 2
    assert (
        f"{adapter}: the adapter was trained on a base in 4 bits, and this one is whole; set "
        "engine.lora.quantize_base=nf4, or merge it first (`shardwise export`) and give the result as model.path"
    ) in done.err
    done = command(*options, f"trainer.output_dir={tmp_path / 'b'}", f"engine.lora={{{lora}, quantize_base: nf4}}")
    assert done.code == 0, done.err


def test_f32_adapters_do_not_go_on_over_another_base(assets, command, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(assets.model, base)
    options = [
        *[f"model.path={base}", f"data.train_files={assets.sft}", "data.max_sequence_tokens=64"],
        *["data.max_train_rows=8", "trainer.batch_size=4", "trainer.tensorboard=false"],
        *["trainer.lr_schedule=constant", f"trainer.output_dir={tmp_path / 'run'}"],
        *["engine.lora={rank: 2, save_merged: false}"],
    ]
    assert command("sft", *options, "trainer.total_steps=1").code == 0
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    model.save_pretrained(base)
    done = command("sft", *options, "trainer.total_steps=2")
    assert done.code == 2
    assert done.err.startswith(
        f"error: {tmp_path / 'run' / 'checkpoints' / 'step_1'} was trained with other files: those of model.path "
        "(model.safetensors) have changed since; put them back, allow it with trainer.resume_allow=[model.path], or "
        "start a new run with "
    )
    shutil.copy(assets.model / "model.safetensors", base)
    assert command("sft", *options, "trainer.total_steps=2").code == 0


@pytest.fixture(scope="module")
def rl(assets, job, tmp_path_factory):
    """With a KL term, two optimizer steps for each rollout, and everything off the device between phases."""
    folder = tmp_path_factory.mktemp("lora") / "rl"
    done = job(
        *[2, "rl", f"model.path={assets.model}", f"data.train_files={assets.parquet}"],
        *["data.max_prompt_tokens=40", "engine.max_tokens_per_micro_batch=128", "rollout.num_prompts=4"],
        *["rollout.group_size=4", "rollout.max_response_tokens=8", f"reward.functions={assets.reward}"],
        *[f"trainer.total_steps={RL_STEPS}", "trainer.learning_rate=1e-2", "trainer.tensorboard=false"],
        *[f"trainer.output_dir={folder}", "algorithm.kl_coef=0.1", "algorithm.num_minibatches=2"],
        *["engine.lora={rank: 4}", "engine.param_offload=true", "engine.optimizer_offload=true"],
    )
    assert done.code == 0, done.err
    return folder


def test_rollout_serves_the_adapted_weights_and_the_reference_is_the_base(rl, assets, metrics_of):
    """Trap 11: an adapter that never reaches the rollout would show in its logprobs."""
    metrics = metrics_of(rl)
    assert len(metrics) == RL_STEPS
    for row in metrics:
        assert row["rollout/logprob_abs_diff_max"] < 1e-4
        assert row["train/grad_norm"] > 1e-4
    kl = [row["policy/ref_kl"] for row in metrics]
    assert kl[-1] > kl[0], "the policy has left its reference"
    assert kl[-1] > 1e-4
    checkpoint = rl / "checkpoints" / f"step_{RL_STEPS}"
    assert {path.name for path in checkpoint.iterdir()} == {"adapter", "hf", "state", "manifest.json"}
    base = AutoModelForCausalLM.from_pretrained(assets.model, dtype=torch.float32).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(checkpoint / "hf", dtype=torch.float32).state_dict()
    assert sum(not torch.equal(merged[name], base[name]) for name in base) == 14


def test_offload_between_phases_changes_no_number(rl, assets, command, metrics_of, tmp_path):
    done = command(
        *["rl", f"model.path={assets.model}", f"data.train_files={assets.parquet}", "data.max_prompt_tokens=40"],
        *["engine.max_tokens_per_micro_batch=128", "rollout.num_prompts=4", "rollout.group_size=4"],
        *["rollout.max_response_tokens=8", f"reward.functions={assets.reward}", f"trainer.total_steps={RL_STEPS}"],
        *["trainer.learning_rate=1e-2", "trainer.tensorboard=false", f"trainer.output_dir={tmp_path}"],
        *["algorithm.kl_coef=0.1", "algorithm.num_minibatches=2", "engine.lora={rank: 4}"],
    )
    assert done.code == 0, done.err
    for offloaded, kept in zip(metrics_of(rl), metrics_of(tmp_path), strict=True):
        assert offloaded["reward/mean"] == kept["reward/mean"]
        assert offloaded["train/loss"] == pytest.approx(kept["train/loss"], abs=1e-5)
        assert offloaded["policy/ref_kl"] == pytest.approx(kept["policy/ref_kl"], rel=1e-3, abs=1e-6)


@needs_integer_shards
@pytest.mark.full
def test_a_base_in_4_bits_is_what_is_sampled_from_compared_with_and_gone_on_from(assets, job, metrics_of, tmp_path):
    """On two ranks with everything off the device between phases; stopped after two steps; and alone in one go."""
    arguments = [
        *["rl", f"model.path={assets.model}", f"data.train_files={assets.parquet}", "data.max_prompt_tokens=40"],
        *["engine.max_tokens_per_micro_batch=128", "rollout.num_prompts=4", "rollout.group_size=4"],
        *["rollout.max_response_tokens=8", f"reward.functions={assets.reward}", "trainer.learning_rate=1e-2"],
        *["trainer.tensorboard=false", "trainer.lr_schedule=constant", "algorithm.kl_coef=0.1"],
        "engine.lora={rank: 4, quantize_base: nf4}",
    ]
    offloaded = ["engine.param_offload=true", "engine.optimizer_offload=true", f"trainer.output_dir={tmp_path / 'two'}"]
    runs = [
        (2, [*offloaded, "trainer.total_steps=2"]),
        (2, [*offloaded, f"trainer.total_steps={RL_STEPS}"]),
        (1, [f"trainer.output_dir={tmp_path / 'one'}", f"trainer.total_steps={RL_STEPS}"]),
    ]
    for nproc, options in runs:
        done = job(nproc, *arguments, *options)
        assert done.code == 0, done.err
    two, one = metrics_of(tmp_path / "two"), metrics_of(tmp_path / "one")
    assert len(two) == len(one) == RL_STEPS
    for row, alone in zip(two, one, strict=True):
        assert row["rollout/logprob_abs_diff_max"] < 1e-4
        assert row["reward/mean"] == alone["reward/mean"]
        assert row["train/loss"] == pytest.approx(alone["train/loss"], abs=1e-5)
        assert row["policy/ref_kl"] == pytest.approx(alone["policy/ref_kl"], rel=1e-3, abs=1e-6)
    assert two[0]["policy/ref_kl"] == pytest.approx(0, abs=1e-6), "the reference is the quantised base"
    hf = {n: tmp_path / n / "checkpoints" / f"step_{RL_STEPS}" / "hf" for n in ("two", "one")}
    merged, alone, base = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (hf["two"], hf["one"], assets.model)
    )
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=1e-4)
        assert torch.equal(tensor, base[name]) == ("_proj." not in name), name


def test_an_adapter_synced_alone_to_other_ranks_trains_the_same(rl, assets, job, metrics_of, tmp_path):
    done = job(
        *[2, "rl", f"model.path={assets.model}", f"data.train_files={assets.parquet}"],
        *["data.max_prompt_tokens=40", "engine.max_tokens_per_micro_batch=128", "rollout.num_prompts=4"],
        *["rollout.group_size=4", "rollout.max_response_tokens=8", f"reward.functions={assets.reward}"],
        *[f"trainer.total_steps={RL_STEPS}", "trainer.learning_rate=1e-2", "trainer.tensorboard=false"],
        *[f"trainer.output_dir={tmp_path}", "algorithm.kl_coef=0.1", "algorithm.num_minibatches=2"],
        *["engine.lora={rank: 4}", "rollout.sync_adapter_only=true", "rollout.placement={num_ranks: 1, delta: true}"],
    )
    assert done.code == 0, done.err
    for alone, merged in zip(metrics_of(tmp_path), metrics_of(rl), strict=True):
        assert alone["reward/mean"] == merged["reward/mean"]
        assert alone["train/loss"] == pytest.approx(merged["train/loss"], abs=1e-5)
        assert alone["rollout/logprob_abs_diff_max"] < 1e-4
        assert 0 < alone["sync/bytes"] < merged["sync/bytes"] / 5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.lora={rank: 4, target_modules: [q_prj]}"], "'q_prj' matches no module of Qwen3ForCausalLM"),
        (
            ["engine.lora={rank: 4, target_parameters: [experts.down_proj]}"],
            "'experts.down_proj' matches no parameter of Qwen3ForCausalLM; its fused experts are: it has none",
        ),
        (
            ["engine.lora={rank: 4, adapter_path: nowhere}"],
            "engine.lora.adapter_path=nowhere is no LoRA adapter: it has no adapter_config.json",
        ),
        (["engine.lora={rank: 0}"], "engine.lora.rank=0: input should be greater than 0"),
        (["engine.lora={rnk: 4}"], "engine.lora.rnk: unknown key; did you mean engine.lora.rank?"),
        (["engine.param_offload=true"], "engine.param_offload=true has no effect in supervised fine-tuning"),
    ],
)
def test_a_mistake_is_one_line_before_any_step(assets, command, tmp_path, overrides, message):
    done = command(
        *["sft", f"model.path={assets.model}", f"data.train_files={assets.sft}", "data.max_sequence_tokens=64"],
        *[f"trainer.output_dir={tmp_path}", "trainer.total_steps=1", *overrides],
    )
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "metrics.jsonl").exists()
