"""Ranks that share sequences compute what one rank and plain transformers compute, family by family (traps 4 and 6)."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from tiny_models import random_samples, reference_logprobs, tiny_folder

from shardwise.config import EngineConfig, FrozenEngineConfig, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.engine import TrainEngine
from shardwise.engine.attention import AttentionBackend, PackedCall, _packed_attention
from shardwise.engine.ulysses import Ulysses
from shardwise.ops import PackedLayout

CPU = torch.device("cpu")
PACKS = [[13], [5, 3, 9], [8], [2], [1]]
"""Lengths of the sequences of each micro-batch. Neither 13 nor 17 divides by 2 or 4; 2 and 1 are fewer than 4 ranks."""
SMALL = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save(config, folder):
    """A random model of another family than those of tiny_models."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def save_family(name, folder):
    from transformers import DeepseekV3Config, Gemma3TextConfig, GPT2Config, GptOssConfig

    match name:
        case "qwen3 4 kv" | "qwen3 2 kv" | "qwen3 1 kv":
            tiny_folder("qwen3", folder, num_key_value_heads=int(name.split()[1]))
        case "gemma2":  # softcap, a window of 4
            tiny_folder("gemma2", folder)
        case "gemma3":  # the window is shorter than two of the sequences and longer than the slice of 13 on one rank
            layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
            save(Gemma3TextConfig(**SMALL | layers, num_key_value_heads=2, head_dim=8), folder)
        case "deepseek_v3":  # queries and keys of 12 dims, values of 6; dense layers only
            ranks = {"q_lora_rank": 10, "kv_lora_rank": 14, "first_k_dense_replace": 2}
            dims = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4}
            save(DeepseekV3Config(**SMALL | ranks | dims), folder)
        case "gpt2":  # learned positions
            dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 131}
            save(GPT2Config(**sizes, **dropouts, initializer_range=0.2, bos_token_id=1, eos_token_id=2), folder)

        case "gpt_oss":  # sinks, a window of 4 in one layer, experts
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 8}
            layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
            save(GptOssConfig(**SMALL | experts | layers), folder)


NAMES = ["qwen3 4 kv", "qwen3 2 kv", "qwen3 1 kv", "gemma2", "gemma3", "deepseek_v3", "gpt2", "gpt_oss"]


def samples_of_packs():
    return [random_samples(lengths, seed=sum(lengths), prompt_tokens=1) for lengths in PACKS]


def weighted_sum(logprobs, mask):
    """A loss in which every token has another weight."""
    weights = torch.linspace(0.5, 1.5, len(logprobs))
    return -(weights * logprobs)[mask].sum()


def packed_loss(outputs, batch, denominators):
    pieces = zip(
        outputs.logprobs.split(batch.cu_seqlens.diff().tolist()),
        batch.loss_mask.split(batch.cu_seqlens.diff().tolist()),
        strict=True,
    )
    return sum(weighted_sum(logprobs, mask) for logprobs, mask in pieces), {}


def scored_and_trained(folders):
    """Of every folder: logprobs by pack and sequence, and the whole gradients of a step on all packs."""
    results = []
    for folder in folders:
        engine = TrainEngine.build(
            Path(folder), EngineConfig(ulysses_size=dist.get_world_size()), device=CPU, optimizer=OptimizerConfig()
        )
        steps = [pack(samples, num_shards=1, max_tokens=64) for samples in samples_of_packs()]
        batches = [step.shards[0][0] for step in steps]
        logprobs = [
            dict(zip(batch.sample_index, out.logprobs.split(batch.cu_seqlens.diff().tolist()), strict=True))
            for batch, out in zip(batches, engine.forward(batches), strict=True)
        ]
        engine.forward_backward(batches, packed_loss, steps[0].denominators)
        gradients = {n: p.grad.full_tensor().clone() for n, p in engine._model.hf_model.named_parameters()}
        results.append((logprobs, gradients))
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name in NAMES:
        made[name] = tmp_path_factory.mktemp("family")
        save_family(name, made[name])
    return made


@pytest.fixture(scope="module")
def references(folders):
    """Of every family, by plain transformers on each sequence alone: logprobs by pack and sequence, gradients."""
    from transformers import AutoModelForCausalLM

    found = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        logprobs = []
        for samples in samples_of_packs():
            scores = [reference_logprobs(model, sample.token_ids) for sample in samples]
            losses = [weighted_sum(s, sample.loss_mask) for s, sample in zip(scores, samples, strict=True)]
            sum(losses).backward() if any(sample.loss_mask.any() for sample in samples) else None
            logprobs.append([torch.where(m.loss_mask, s.detach(), 0.0) for s, m in zip(scores, samples, strict=True)])
        found[name] = logprobs, {n: p.grad for n, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 4))])
def test_logprobs_and_gradients_of_shared_sequences_equal_those_of_each_sequence_alone(
    run_ranks, folders, references, world_size
):
    ranks = run_ranks(scored_and_trained, world_size, [str(folder) for folder in folders.values()])
    for rank in ranks:
        for (name, (expected_logprobs, expected_gradients)), (logprobs, gradients) in zip(
            references.items(), rank, strict=True
        ):
            for expected, found in zip(expected_logprobs, logprobs, strict=True):
                for index, values in enumerate(expected):
                    torch.testing.assert_close(
                        found[index], values, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                    )
            assert gradients.keys() == expected_gradients.keys()
            for parameter, gradient in gradients.items():
                error = (gradient - expected_gradients[parameter]).abs().max()
                largest = expected_gradients[parameter].abs().max()
                assert error <= 1e-5 * largest, (name, parameter, float(error / largest))


def forward_versions(folders, versions):
    """Of every folder and version of the samples: the logprobs of each sequence."""
    results = []
    for folder in folders:
        engine = TrainEngine.build(Path(folder), FrozenEngineConfig(ulysses_size=dist.get_world_size()), device=CPU)
        steps = [pack(samples, num_shards=1, max_tokens=64) for samples in versions]
        outputs = engine.forward([step.shards[0][0] for step in steps])
        results.append([unpack(step, [[out.logprobs]]) for step, out in zip(steps, outputs, strict=True)])
    return results


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_trap_06_sequences_of_one_pack_never_see_each_other_on_any_rank(run_ranks, folders, world_size):
    """Trap 6: with the first token of one sequence changed, every other sequence keeps its bits, but for roundings in
    experts, which compute the tokens of all sequences together."""
    samples = random_samples([9, 7, 7, 3], prompt_tokens=1)
    versions = [samples]
    for changed, sample in enumerate(samples):
        tokens = sample.token_ids.clone()
        tokens[0] = 3 + (tokens[0] - 3 + 50) % 97
        versions.append([replace(s, token_ids=tokens) if i == changed else s for i, s in enumerate(samples)])
    [results, *others] = run_ranks(forward_versions, world_size, [str(folder) for folder in folders.values()], versions)
    for name, (original, *found) in zip(folders, results, strict=True):
        for changed, logprobs in enumerate(found):
            for index, values in enumerate(logprobs):
                distance = (values - original[index]).abs().max()
                bound = 1e-5 if name == "gpt_oss" else 0.0
                assert (distance <= bound) == (index != changed), (name, changed, index, distance)
    for other in others:
        for ours, theirs in zip(results, other, strict=True):
            assert all(torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


def attend_with_sinks(query, key, value, sinks, coefficients, lengths):
    """This rank's tokens through the function that transformers calls: output and gradients, of its slice."""
    ulysses = Ulysses(dist.group.WORLD) if dist.get_world_size() > 1 else None
    size, rank = dist.get_world_size(), dist.get_rank()
    own = slice(rank * query.shape[2] // size, (rank + 1) * query.shape[2] // size)
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0).int(), device=CPU)
    leaves = [tensor[:, :, own].clone().requires_grad_() for tensor in (query, key, value)]
    sinks = sinks.clone().requires_grad_()
    out, _ = _packed_attention(
        torch.nn.Identity(), *leaves, None, packed=PackedCall(layout, AttentionBackend("loop", ulysses)), s_aux=sinks
    )
    (out * coefficients[:, own]).sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves], sinks.grad


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_attention_sinks_go_with_their_heads(run_ranks, num_kv_heads):
    """gpt-oss: each rank takes the sinks of its own heads, and the ranks' gradients of the sinks add up."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 16, 8, generator=generator) for heads in (4, num_kv_heads, num_kv_heads))
    sinks, coefficients = torch.randn(4, generator=generator), torch.randn(1, 16, 4, 8, generator=generator)
    arguments = query, key, value, sinks, coefficients, [9, 5, 2]
    [(out, grads, sinks_grad)] = run_ranks(attend_with_sinks, 1, *arguments)
    scores = (query[0] @ key[0].repeat_interleave(4 // num_kv_heads, 0).transpose(1, 2)) / 8**0.5
    start = torch.tensor([0] * 9 + [9] * 5 + [14] * 2)
    place = torch.arange(16)
    seen = (place[None, :] <= place[:, None]) & (place[None, :] >= start[:, None])
    powers = torch.where(seen, scores.exp(), 0.0)
    by_hand = powers / (powers.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    by_hand = (by_hand @ value[0].repeat_interleave(4 // num_kv_heads, 0)).transpose(0, 1)[None]
    torch.testing.assert_close(out, by_hand, rtol=0, atol=1e-5)
    for world_size in (2, 4):
        ranks = run_ranks(attend_with_sinks, world_size, *arguments)
        torch.testing.assert_close(torch.cat([rank[0] for rank in ranks], 1), out, rtol=0, atol=1e-6)
        for place, grad in enumerate(grads):
            torch.testing.assert_close(torch.cat([rank[1][place] for rank in ranks], 2), grad, rtol=0, atol=1e-5)
        torch.testing.assert_close(sum(rank[2] for rank in ranks), sinks_grad, rtol=0, atol=1e-5)


def build(folder, ulysses_size):
    TrainEngine.build(Path(folder), EngineConfig(ulysses_size=ulysses_size), device=CPU, optimizer=OptimizerConfig())


@pytest.mark.parametrize(
    ("name", "mixer"), [("qwen3_next", "Qwen3NextGatedDeltaNet"), ("qwen3_5_text", "Qwen3_5GatedDeltaNet")]
)
def test_linear_attention_is_refused(run_ranks, tmp_path, name, mixer):
    """A state that passes from token to token would have to pass from rank to rank."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **SMALL, num_key_value_heads=2, head_dim=8)
    assert "linear_attention" in config.layer_types
    config.save_pretrained(tmp_path)
    with pytest.raises(RankError) as error:
        run_ranks(build, 2, str(tmp_path), 2)
    message = f"between ranks: it carries a recurrent state from token to token ({mixer}); set it to 1\n"
    assert str(error.value).count("ModelError: ") == str(error.value).count(message) == 2


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do(run_ranks, tmp_path):
    folder = tiny_folder("llama", tmp_path)
    with pytest.raises(RankError) as error:
        run_ranks(build, 2, str(folder), 2)
    message = (
        "ConfigError: engine.ulysses_size=2 does not divide num_attention_heads=3; on 2 ranks that share one copy "
        "of the model use 1\n"
    )
    assert str(error.value).count(message) == 2
