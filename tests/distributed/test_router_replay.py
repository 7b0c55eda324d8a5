"""Training sends tokens to the experts that the embedded engine sent them to, on every layout."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES, save_model
from ranks import RankError
from tiny_models import random_samples, tiny_folder
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from shardwise.config import EngineConfig, LoraConfig, ModelError, OptimizerConfig
from shardwise.data.packing import pack, unpack
from shardwise.engine import TrainEngine
from shardwise.families import routers_of
from shardwise.recipes.losses import sft_loss
from shardwise.recipes.sampling.samples import to_samples
from shardwise.rollout import EmbeddedEngine
from shardwise.types import Completion, Example, GenerateRequest, RolloutGroup

CPU = torch.device("cpu")
NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 6, 2, 2
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}
LENGTHS = [11, 4, 7, 1, 9]
CHECKPOINTED = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
CELLS = {
    1: [{}, {"apply_tiled_mlp": True, "tiled_num_shards": 3, **CHECKPOINTED}, SELECTIVE],
    2: [CHECKPOINTED, {"ulysses_size": 2, "apply_tiled_mlp": True}, {"ep_size": 2}, {"ep_size": 2, "ulysses_size": 2}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder("qwen3_moe", tmp_path_factory.mktemp("experts"), **SIZES)


def chosen_at_random():
    """Samples whose experts are drawn; those of the last token are left to the router."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for sample in random_samples(LENGTHS):
        scores = torch.rand(len(sample.token_ids), NUM_LAYERS, NUM_EXPERTS, generator=generator)
        experts = scores.topk(NUM_CHOSEN).indices.to(torch.int16)
        experts[-1] = -1
        samples.append(replace(sample, experts=experts))
    return samples


def reference(folder, samples):
    """Of plain transformers whose top-k is written out: logprobs, the gradients of cross-entropy, and the share of
    choices that differ."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    counts, current = [0, 0], {}

    def route(layer, module, hidden):
        logits = torch.nn.functional.linear(hidden, module.weight)
        probabilities, rows = logits.softmax(-1), []
        for probability, wanted in zip(probabilities, current["experts"][:, layer].tolist(), strict=True):
            own = probability.topk(NUM_CHOSEN).indices.tolist()
            experts = own if wanted[0] < 0 else wanted
            if wanted[0] >= 0:
                counts[0] += len(set(own) - set(wanted))
                counts[1] += len(wanted)
            rows.append(experts)
        chosen = torch.tensor(rows)
        weights = probabilities.gather(1, chosen)
        if module.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    for layer, block in enumerate(model.model.layers):
        gate = block.mlp.gate
        gate.forward = lambda hidden, layer=layer, gate=gate: route(layer, gate, hidden)
    logprobs, losses = [], []
    for sample in samples:
        current["experts"] = sample.experts
        logits = model(input_ids=sample.token_ids[None], use_cache=False).logits[0]
        scores = logits.log_softmax(-1)[:-1].gather(1, sample.token_ids[1:, None])[:, 0]
        logprobs.append(torch.where(sample.loss_mask, torch.cat([scores.new_zeros(1), scores]), 0.0).detach())
        losses += list(-scores[sample.loss_mask[1:]])
    (sum(losses) / len(losses)).backward()
    return logprobs, {name: p.grad for name, p in model.named_parameters()}, counts[0] / counts[1]


def build(folder, **keys):
    return TrainEngine.build(Path(folder), EngineConfig(**keys), device=CPU, optimizer=OptimizerConfig())


def train_cells(folder, samples, cells):
    """Of every cell the logprobs, the whole gradients, and the share of choices that differ."""
    found = []
    for keys in cells:
        engine = build(folder, **keys)
        num_sharing = keys.get("ulysses_size", 1)
        step = pack(samples, num_shards=dist.get_world_size() // num_sharing, max_tokens=14)
        batches = step.shards[dist.get_rank() // num_sharing]
        logprobs = {
            index: out.logprobs[batch.cu_seqlens[place] : batch.cu_seqlens[place + 1]]
            for batch, out in zip(batches, engine.forward(batches), strict=True)
            for place, index in enumerate(batch.sample_index)
        }
        engine.forward_backward(batches, sft_loss, step.denominators)
        gradients = {
            name.replace("_checkpoint_wrapped_module.", ""): p.grad.full_tensor().clone()
            for name, p in engine._model.hf_model.named_parameters()
        }
        found.append((logprobs, gradients, engine.optim_step()["train/router/replay_mismatch"].result()))
    return found


@pytest.mark.parametrize("world_size", CELLS)
def test_logprobs_and_gradients_are_those_of_the_experts_that_are_given(run_ranks, folder, world_size):
    samples = chosen_at_random()
    logprobs, gradients, mismatch = reference(folder, samples)
    assert 0.3 < mismatch < 0.9
    ranks = run_ranks(train_cells, world_size, str(folder), samples, CELLS[world_size])
    for place, keys in enumerate(CELLS[world_size]):
        for found_logprobs, found_gradients, found_mismatch in (rank[place] for rank in ranks):
            assert found_mismatch == pytest.approx(mismatch, rel=1e-6), keys
            for index, scores in found_logprobs.items():
                torch.testing.assert_close(scores, logprobs[index], rtol=0, atol=1e-5)
            for name, gradient in gradients.items():
                error = (found_gradients[name] - gradient).abs().max() / gradient.abs().max()
                assert error < 2e-5, (keys, name, error)


def sampled_and_scored(folder):
    """Completions with their experts, the trainer's own choice for their tokens, and the trainer's logprobs without and
    with the replay, after a change of the routers that moves tokens to other experts."""
    rollout = EmbeddedEngine.from_folder(Path(folder), dtype=torch.float32, max_rows=3, device=CPU)
    prompts = [[5, 9, 11, 4], [7], [8, 3, 20, 21, 22, 6]]
    requests = [
        GenerateRequest(uid=str(n), prompt_ids=ids, num_completions=2, max_tokens=9, temperature=1.0, with_experts=True)
        for n, ids in enumerate(prompts)
    ]
    groups = [
        RolloutGroup(
            example=Example(uid=str(n), prompt_ids=ids, prompt="", data_source="", ground_truth=None),
            completions=completions,
            texts=["", ""],
            answers=["", ""],
            rewards=[0.0, 0.0],
            reward_parts=[{}, {}],
            failures=[None, None],
        )
        for n, (ids, completions) in enumerate(zip(prompts, rollout.generate(requests), strict=True))
    ]
    samples = to_samples(groups)
    engine = build(folder)
    found = []
    for scale in (0.0, 0.05):
        with torch.no_grad():
            for layer in engine._model.hf_model.model.layers:
                layer.mlp.gate.weight.add_(scale * torch.randn_like(layer.mlp.gate.weight))
        scored = []
        for version in ([replace(sample, experts=None) for sample in samples], samples):
            step = pack(version, num_shards=1, max_tokens=64)
            outputs = engine.forward(step.shards[0])
            scored.append(unpack(step, [[out.logprobs for out in outputs]]))
        engine.forward_backward(step.shards[0], sft_loss, step.denominators)
        engine._optimizer.zero_grad()
        mismatch = engine._replay.take()["train/router/replay_mismatch"].result()
        differences = [
            torch.cat([a - b.rollout_logprobs for a, b in zip(version, samples, strict=True)]) for version in scored
        ]
        found.append((mismatch, *(float(difference.abs().mean()) for difference in differences)))
    shapes = [(len(sample.token_ids), sample.experts.shape, sample.experts[-1].unique().tolist()) for sample in samples]
    return found, shapes


def test_the_embedded_engine_tells_the_experts_of_every_token(run_ranks, folder):
    """With equal weights the trainer chooses the same ones. With other routers the replay brings it back to them."""
    [([same, changed], shapes)] = run_ranks(sampled_and_scored, 1, str(folder))
    for length, shape, last in shapes:
        assert shape == (length, NUM_LAYERS, NUM_CHOSEN)
        assert last == [-1]
    mismatch, own, replayed = same
    assert mismatch == 0.0
    assert max(own, replayed) < 1e-5
    mismatch, own, replayed = changed
    assert mismatch > 0.01
    assert replayed < 0.7 * own


def test_what_was_chosen_first_counts_where_a_completion_is_gone_on_with():
    first, again = torch.arange(8).view(4, 1, 2), 100 + torch.arange(16).view(8, 1, 2)
    begun, more = (
        Completion(token_ids=[1, 2], logprobs=[0.0, 0.0], finish_reason="stop", policy_version=0, experts=experts)
        for experts in (first, again)
    )
    assert torch.equal(begun.then(more).experts, torch.cat([first, again[4:]]))


def replay_phimoe(folder):
    engine = build(folder)
    step = pack(chosen_at_random(), num_shards=1, max_tokens=64)
    engine.forward(step.shards[0])


def test_routers_that_do_not_choose_by_topk_are_refused(run_ranks, tmp_path):
    from transformers import PhimoeConfig, PhimoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = PhimoeConfig(vocab_size=107, num_key_value_heads=1, num_local_experts=NUM_EXPERTS, **sizes)
    PhimoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(RankError, match=r"PhimoeTopKRouter does not choose experts by topk over all of them"):
        run_ranks(replay_phimoe, 1, str(tmp_path))


def mismatch_of_a_step(folder, samples, lora):
    engine = build(folder, lora=lora)
    step = pack(samples, num_shards=dist.get_world_size(), max_tokens=64)
    engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
    return engine.optim_step()["train/router/replay_mismatch"].result()


def test_a_rank_without_samples_replays_nothing(run_ranks, folder):
    samples = chosen_at_random()[:1]
    alone, *together = (
        found for size in (1, 2) for found in run_ranks(mismatch_of_a_step, size, str(folder), samples, None)
    )
    assert together == [alone, alone]


@pytest.mark.parametrize("saved", ["gate", "mlp"])
def test_a_router_that_adapters_train_whole_is_one(run_ranks, folder, saved):
    samples = chosen_at_random()
    lora = LoraConfig(rank=2, target_modules=["q_proj"], modules_to_save=[saved])
    (adapted,) = run_ranks(mismatch_of_a_step, 1, str(folder), samples, lora)
    assert adapted == run_ranks(mismatch_of_a_step, 1, str(folder), samples, None)[0]


def test_choices_of_another_number_of_routers_are_refused(run_ranks, folder):
    samples = [replace(sample, experts=sample.experts[:, :1]) for sample in chosen_at_random()]
    with pytest.raises(RankError, match=r"tells the choices of 1 routers, and the model that is trained has 2"):
        run_ranks(mismatch_of_a_step, 1, str(folder), samples, None)


def replay_with_routers_that_give_no_logits(folder, samples):
    """What this rank is told by passes without and with a gradient; nothing where none is replayed."""
    choose, told = Qwen3MoeTopKRouter.forward, []
    with patch.object(Qwen3MoeTopKRouter, "forward", lambda *args: (None, *choose(*args)[1:])):
        engine = build(folder)
        for version in (samples, [replace(sample, experts=None) for sample in samples]):
            step = pack(version, num_shards=dist.get_world_size(), max_tokens=64)
            batches = step.shards[dist.get_rank()]
            for run in (
                lambda batches=batches: engine.forward(batches),
                lambda batches=batches, step=step: engine.forward_backward(batches, sft_loss, step.denominators),
            ):
                engine._is_accumulating = False  # of a refused pass nothing is left
                try:
                    run()
                    told.append("")
                except ModelError as error:
                    told.append(str(error))
    return told


def test_replay_of_routers_that_cannot_be_read_is_refused_by_every_rank_and_pass(run_ranks, folder):
    """Also by a rank without samples. Without replay they are only not counted."""
    message = (
        "rollout.router_replay=true: model.layers.0.mlp.gate cannot be read: Qwen3MoeTopKRouter does not give its "
        "logits; set it to false for this model"
    )
    ranks = run_ranks(replay_with_routers_that_give_no_logits, 2, str(folder), chosen_at_random()[:1])
    assert ranks == [[message, message, "", ""]] * 2


def replayed_groups(folder):
    """Of a router whose experts [0, 1] and [2, 3] are groups, with each pair replayed: logits, weights, the share of
    choices that differ, and what it chooses by itself."""
    engine, found = build(folder), []
    (router,) = routers_of(engine._model.hf_model)
    router.modules[0].register_forward_hook(lambda _module, _args, out: found.append(out))
    samples, results = random_samples([30], vocab=97), []
    engine.forward(pack(samples, num_shards=1, max_tokens=64).shards[0])
    own = found.pop()[2]
    for experts in ([0, 1], [2, 3]):
        given = [replace(s, experts=torch.tensor([[experts]] * len(s.token_ids)).short()) for s in samples]
        step = pack(given, num_shards=1, max_tokens=64)
        engine.forward_backward(step.shards[0], sft_loss, step.denominators)
        logits, weights, chosen = (part.detach() for part in found.pop())
        assert chosen.unique().tolist() == experts
        mismatch = engine._replay.take()["train/router/replay_mismatch"].result()
        results.append((logits.float(), weights, chosen, mismatch, router.modules[0].routed_scaling_factor))
    return own, results


def replayed_probabilities(folder):
    """Of every router of Gemma 4, with random experts replayed: its probabilities, the weights and the experts that it
    gives, and the factors of the weights."""
    engine, found = build(folder), []
    routers = routers_of(engine._model.hf_model)
    for router in routers:
        router.modules[0].register_forward_hook(lambda _module, _args, out: found.append([t.detach() for t in out]))
    [sample] = random_samples([9], vocab=97)
    experts = torch.rand(9, len(routers), 4).topk(2).indices.to(torch.int16)
    step = pack([replace(sample, experts=experts)], num_shards=1, max_tokens=64)
    engine.forward(step.shards[0])
    factors = [router.modules[0].per_expert_scale.full_tensor() for router in routers]
    return experts, [(*out, factor) for out, factor in zip(found, factors, strict=True)]


def test_a_router_that_gives_probabilities_is_replayed(run_ranks, tmp_path):
    save_model("gemma4_text", FAMILIES["gemma4_text"], tmp_path)
    [(experts, found)] = run_ranks(replayed_probabilities, 1, str(tmp_path))
    assert len(found) == experts.shape[1]
    for place, (probabilities, weights, chosen, factors) in enumerate(found):
        assert torch.equal(chosen, experts[:, place].long())
        expected = probabilities.gather(1, chosen)
        expected /= expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, expected * factors[chosen])


GROUPS = {"n_group": 2, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "options"),
    [("deepseek_v2", {"topk_method": "group_limited_greedy"}), ("deepseek_v3", {"norm_topk_prob": True})],
)
def test_experts_of_a_group_that_is_not_chosen_now_keep_their_weights(run_ranks, tmp_path, family, options):
    """The router masks the scores of all groups but the best one. What differs from the replay is what it chooses by
    itself."""
    save_model(family, FAMILIES[family] | GROUPS | options, tmp_path)
    [(own, results)] = run_ranks(replayed_groups, 1, str(tmp_path))
    in_second = (own >= 2).all(1).double().mean().item()
    assert 0.1 < in_second < 0.9
    assert [mismatch for _, _, _, mismatch, _ in results] == pytest.approx([in_second, 1 - in_second])
    for logits, weights, chosen, _, scale in results:
        if family == "deepseek_v2":
            expected = logits.softmax(-1).gather(1, chosen)
        else:
            expected = logits.sigmoid().gather(1, chosen)
            expected /= expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, scale * expected, rtol=1e-5, atol=1e-6)
