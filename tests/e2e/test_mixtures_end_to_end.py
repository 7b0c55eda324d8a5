"""`shardwise rl` of a mixture of experts: routers that replay the rollout's choice, experts that ranks share."""

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoeForSequenceClassification

from benchmarks.preference_problems import preference_problems

LORA = "engine.lora={rank: 3, target_modules: [q_proj], target_parameters: [gate_up_proj, down_proj]}"
ADAPTED = {
    f"model.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in ("self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
}
"""What changes with LORA."""


@pytest.fixture
def mixture(assets, tmp_path):
    return saved_mixture(assets, tmp_path / "mixture", num_experts=6)


def saved_mixture(assets, folder, **overrides):
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    config = Qwen3MoeConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts_per_tok=2,
        max_position_embeddings=96,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **overrides,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_run_replays_experts_and_says_how_far_apart_it_was(assets, job, metrics_of, tmp_path):
    """In bfloat16, where roundings send tokens elsewhere, to one of so many experts: minibatches, a frozen router, the
    loss of the load."""
    mixture = saved_mixture(assets, tmp_path / "mixture", num_experts=64, norm_topk_prob=True)
    done = job(
        1,
        "rl",
        *[f"model.path={mixture}", f"data.train_files={assets.parquet}", "data.max_prompt_tokens=40"],
        *["engine.param_dtype=bfloat16", "engine.max_tokens_per_micro_batch=128", "engine.freeze_router=true"],
        *["engine.router_aux_loss_coef=0.01", "engine.router_metrics=layers", "rollout.router_replay=true"],
        *["rollout.num_prompts=8", "rollout.group_size=8", "rollout.max_response_tokens=8"],
        *["rollout.probe_every_syncs=2", f"reward.functions={assets.reward}", "algorithm.num_minibatches=2"],
        *["algorithm.kl_coef=0.1", "trainer.total_steps=2", "trainer.learning_rate=1e-4"],
        *["trainer.tensorboard=false", f"trainer.output_dir={tmp_path / 'run'}"],
    )
    assert done.code == 0, done.err
    rows = metrics_of(tmp_path / "run")
    assert ["rollout/difference_own_experts" in row for row in rows] == [True, False]
    for row in rows:
        assert row["train/router/replay_mismatch"] < 0.2
        assert 2 <= row["train/router/aux_loss"] < 6
        assert row["train/router/max_violation/model.layers.1.mlp.gate"] > 0
    replayed, own = (rows[0][f"rollout/difference_{whose}_experts"] for whose in ("replayed", "own"))
    assert 0 < replayed < own < 0.05


@pytest.mark.full
def test_an_ep_size_that_does_not_divide_the_experts_is_told_once_with_those_that_do(mixture, assets, shell, tmp_path):
    config = Qwen3MoeConfig.from_pretrained(mixture)
    config.num_experts = 3
    config.save_pretrained(mixture)
    done = shell(
        *["shardwise", "sft", "--nproc", "2", f"model.path={mixture}", f"data.train_files={assets.sft}"],
        *["data.max_train_rows=4", "data.max_sequence_tokens=64", "engine.ep_size=2", "trainer.tensorboard=false"],
        f"trainer.output_dir={tmp_path / 'run'}",
    )
    assert done.code == 2
    assert done.err == (
        "error: engine.ep_size=2 does not divide the 3 experts of model.layers.0.mlp.experts; use 1 or 3\n"
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.full
def test_adapters_of_experts_learn_from_rewards_alike_on_one_rank_and_two(mixture, assets, job, metrics_of, tmp_path):
    """Experts are units of their own; the reference is the policy without adapters; saved with the merged model, which
    is what peft makes of base and adapter."""

    def run(num_ranks):
        folder = tmp_path / str(num_ranks)
        done = job(
            num_ranks,
            "rl",
            *[f"model.path={mixture}", f"data.train_files={assets.parquet}", "data.max_prompt_tokens=40"],
            *["engine.max_tokens_per_micro_batch=128", "engine.wrap_policy.moe_experts=[Qwen3MoeExperts]"],
            LORA,
            *["rollout.num_prompts=4", "rollout.group_size=4", "rollout.max_response_tokens=8"],
            *[f"reward.functions={assets.reward}", "algorithm.num_minibatches=2", "algorithm.kl_coef=0.1"],
            *["trainer.total_steps=2", "trainer.learning_rate=1e-2", "trainer.save_every_steps=2"],
            *["trainer.tensorboard=false", f"trainer.output_dir={folder}"],
        )
        assert done.code == 0, done.err
        return metrics_of(folder), folder / "checkpoints" / "step_2"

    (alone, checkpoint), (shared, _) = run(1), run(2)
    for row, other in zip(alone, shared, strict=True):
        assert row["train/grad_norm"] > 0
        for name in ("train/loss", "train/grad_norm", "reward/mean", "rollout/response_tokens/mean"):
            if name in row:
                assert other[name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), name
    base = Qwen3MoeForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = PeftModel.from_pretrained(base, checkpoint / "adapter").merge_and_unload().state_dict()
    merged = Qwen3MoeForCausalLM.from_pretrained(checkpoint / "hf", dtype=torch.float32).state_dict()
    assert merged.keys() == expected.keys() == start.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-5)
    moved = {name for name in start if not torch.equal(start[name], merged[name])}
    assert moved == ADAPTED


def test_a_run_whose_ranks_share_experts_or_sequences_is_that_of_whole_ones(mixture, assets, job, metrics_of, tmp_path):
    """Weights that travel to the rollout, replayed routers, a reference model, two minibatches; saved in the
    background, and gone on with by ranks that hold all experts, as the other way round."""

    def run(name, *overrides):
        folder = tmp_path / name
        done = job(
            2,
            "rl",
            *[f"model.path={mixture}", f"data.train_files={assets.parquet}", "data.max_prompt_tokens=40"],
            *["engine.max_tokens_per_micro_batch=128", "rollout.router_replay=true", "rollout.temperature=1.0"],
            *["rollout.num_prompts=4", "rollout.group_size=4", "rollout.max_response_tokens=8"],
            *[f"reward.functions={assets.reward}", "algorithm.num_minibatches=2", "algorithm.kl_coef=0.1"],
            # An epsilon that keeps Adam from turning the rounding of gradients near 0 into whole steps.
            *["trainer.learning_rate=1e-3", "trainer.adam_eps=1e-4"],
            *["trainer.save_every_steps=1", "trainer.keep_last=3", "trainer.total_steps=2"],
            *[f"trainer.output_dir={folder}", "trainer.tensorboard=false", *overrides],
        )
        assert done.code == 0, done.err
        return metrics_of(folder), load_file(folder / "checkpoints" / "step_2" / "hf" / "model.safetensors")

    def go_on(name, other, *overrides):
        """From the first checkpoint of the other run."""
        shutil.copytree(tmp_path / other, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step_2")
        return run(name, *overrides)

    shared = ["engine.ep_size=2", "reference.ep_size=2"]
    expected, weights = run("whole", "reference.ep_size=1")
    others = [
        run("sequences", "engine.ulysses_size=2"),
        run("shared", *shared),
        go_on("joined", "shared", "reference.ep_size=1"),
        go_on("parted", "whole", *shared),
    ]
    assert [row["train/grad_norm"] > 0 for row in expected] == [True, True]
    for rows, tensors in others:
        for row, other in zip(expected, rows, strict=True):
            for name in ("train/loss", "train/grad_norm", "reward/mean", "rollout/response_tokens/mean"):
                if name in row:
                    assert other[name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), name
        assert tensors.keys() == weights.keys()
        for name, tensor in tensors.items():
            assert (tensor - weights[name]).abs().max() < 1e-4, name


@pytest.mark.parametrize("recipe", [pytest.param("preference", marks=pytest.mark.full), "reward-model"])
def test_adapters_of_experts_learn_from_pairs_and_peft_and_export_read_them(
    mixture, assets, job, command, tmp_path, recipe
):
    """On two ranks, with the reward model's head: what is written merged is what peft makes of base and adapter, and
    what `shardwise export` does."""
    pairs = preference_problems(tmp_path / "pairs", seed=0, num_held_out=8).pairs_train
    trained = job(
        *[2, recipe, f"model.path={mixture}", f"data.train_files={pairs}", "data.max_sequence_tokens=64"],
        *["data.max_train_rows=16", "trainer.batch_size=8", "trainer.total_steps=2", "trainer.learning_rate=1e-2"],
        *["trainer.tensorboard=false", f"trainer.output_dir={tmp_path / 'run'}"],
        LORA,
    )
    assert trained.code == 0, trained.err
    checkpoint = tmp_path / "run" / "checkpoints" / "step_2"
    done = command("export", str(checkpoint / "adapter"), str(tmp_path / "out"))
    assert done.code == 0, done.err
    if recipe == "preference":
        kind, options = Qwen3MoeForCausalLM, {}
    else:
        kind, options = Qwen3MoeForSequenceClassification, {"num_labels": 1}
    base = kind.from_pretrained(mixture, dtype=torch.float32, **options)
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected = PeftModel.from_pretrained(base, checkpoint / "adapter").merge_and_unload().state_dict()
    for folder in (checkpoint / "hf", tmp_path / "out"):
        found = kind.from_pretrained(folder, dtype=torch.float32).state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)
    moved = {name for name in start if name != "score.weight" and not torch.equal(start[name], expected[name])}
    assert moved == ADAPTED
