"""The load of experts and the auxiliary loss are those of the sequences, whatever the layout, the packing and the
options that save memory (trap 1).

The reference runs each sequence alone through transformers in float64 and takes its router_logits; loads and losses are
loops over tokens.
"""

import contextlib
import io
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES, save_model
from tiny_models import random_samples, tiny_folder
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from shardwise.config import EngineConfig, LoraConfig, OptimizerConfig
from shardwise.data.packing import pack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
LENGTHS = [11, 4, 7, 7, 1, 16, 3, 9, 9, 5]
"""The sequence of one token trains nothing: it loads experts and is no part of the loss."""
COEF = 0.3
NUM_EXPERTS, NUM_CHOSEN = 6, 2
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}
GATES = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
CHECKPOINTED = {"activation_checkpointing": "full"}
CELLS = {
    1: [
        ({}, 64),
        ({}, 16),
        ({"apply_tiled_mlp": True, "tiled_num_shards": 3}, 40),
        ({"apply_tiled_mlp": True, **CHECKPOINTED}, 40),
        ({"activation_checkpointing": "selective", "activation_offload": True}, 40),
        ({"freeze_module_prefix": ["model.embed_tokens", "model.layers.0"]}, 40),
    ],
    2: [
        ({}, 16),
        ({"fsdp_size": 1, "reduce_gradients": "last_micro_batch", **CHECKPOINTED}, 16),
        ({"ulysses_size": 2, "apply_tiled_mlp": True, **CHECKPOINTED}, 16),
        ({"wrap_policy": {"moe_experts": ["Qwen3MoeExperts"]}, "activation_checkpointing": "selective"}, 16),
        ({"module_precision": [{"module": "model.layers.*.mlp.gate"}]}, 16),
        ({"ep_size": 2}, 16),
        ({"ep_size": 2, "ulysses_size": 2, **CHECKPOINTED}, 16),
    ],
    4: [
        ({}, 40),  # more ranks than micro-batches: some have only an empty one
        ({"fsdp_size": 2, "ulysses_size": 2, **CHECKPOINTED}, 16),
        ({"ulysses_size": 4}, 17),
        ({"ulysses_size": 2, "reduce_gradients": "last_micro_batch"}, 64),
        ({"fsdp_size": 2, "ep_size": 2}, 40),
    ],
}
"""By number of ranks: keys of the engine, and the tokens of a micro-batch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder("qwen3_moe", tmp_path_factory.mktemp("experts"), **SIZES)


def routed(model, sample):
    """Logits [T, E] and chosen experts [T, k] of each layer, of a sequence alone, and the model's output logits."""
    out = model(input_ids=sample.token_ids[None], use_cache=False, output_router_logits=True)
    return [(logits, logits.topk(NUM_CHOSEN).indices) for logits in out.router_logits], out.logits[0]


@pytest.fixture(scope="module")
def expected(folder):
    """Loads [layer][expert], the auxiliary loss, and the gradients of cross-entropy + COEF x that loss."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    samples = random_samples(LENGTHS)
    loads = torch.zeros(len(GATES), NUM_EXPERTS)
    entropies, losses = [], []
    for sample in samples:
        layers, logits = routed(model, sample)
        for load, (_, chosen) in zip(loads, layers, strict=True):
            for expert in chosen.flatten():
                load[expert] += 1
        if not sample.loss_mask.any():
            continue
        entropies += list(-logits.log_softmax(-1)[:-1].gather(1, sample.token_ids[1:, None])[sample.loss_mask[1:]])
        for router_logits, chosen in layers:
            loss = 0.0
            for expert in range(NUM_EXPERTS):
                share = sum(expert in row for row in chosen.tolist()) / len(chosen)
                mean = sum(row.softmax(-1)[expert] for row in router_logits) / len(router_logits)
                loss = loss + NUM_EXPERTS * share * mean
            losses.append(loss)
    aux_loss = sum(losses) / len(losses)
    (sum(entropies) / len(entropies) + COEF * aux_loss).backward()
    return loads.tolist(), aux_loss.item(), {name: p.grad.float() for name, p in model.named_parameters()}


def train_cells(folder, cells):
    """Of every cell the metrics of a step and the whole gradients before it, None where a weight is frozen."""
    found = []
    for keys, cap in cells:
        engine = TrainEngine.build(
            Path(folder),
            EngineConfig(router_aux_loss_coef=COEF, router_metrics="experts", **keys),
            device=CPU,
            optimizer=OptimizerConfig(),
        )
        num_sharing = keys.get("ulysses_size", 1)
        step = pack(random_samples(LENGTHS), num_shards=dist.get_world_size() // num_sharing, max_tokens=cap)
        batches = step.shards[dist.get_rank() // num_sharing]
        engine.forward(batches)  # no training: counts nothing
        engine.forward_backward(batches, sft_loss, step.denominators)
        gradients = {
            name.replace("_checkpoint_wrapped_module.", ""): None if p.grad is None else p.grad.full_tensor().clone()
            for name, p in engine._model.hf_model.named_parameters()
        }
        metrics = {name: value.result() for name, value in engine.optim_step().items() if "router/" in name}
        found.append((metrics, gradients))
    return found


def expected_metrics(loads, aux_loss):
    violations = [max(load) / (sum(load) / len(load)) - 1 for load in loads]
    dead = [load.count(0) for load in loads]
    found = {
        "max_violation": sum(violations) / len(violations),
        "worst_violation": max(violations),
        "dead_experts": sum(dead),
        "aux_loss": aux_loss,
    }
    for gate, load, violation, num_dead in zip(GATES, loads, violations, dead, strict=True):
        found |= {f"max_violation/{gate}": violation, f"dead_experts/{gate}": num_dead}
        found |= {f"load/{gate}/{expert}": count / sum(load) for expert, count in enumerate(load)}
    return {f"train/router/{name}": value for name, value in found.items()}


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_loads_loss_and_gradients_are_those_of_sequences_alone_on_every_layout(run_ranks, folder, expected, world_size):
    """Recomputation, empty micro-batches, the padding of shared sequences, passes without training count nothing.
    Rank 0 tells the metrics for all."""
    loads, aux_loss, gradients = expected
    wanted = expected_metrics(loads, aux_loss)
    ranks = run_ranks(train_cells, world_size, str(folder), CELLS[world_size], timeout_seconds=120)
    for place, (keys, cap) in enumerate(CELLS[world_size]):
        for rank, (metrics, found) in enumerate(cells[place] for cells in ranks):
            assert metrics == (pytest.approx(wanted, rel=1e-5) if rank == 0 else {}), (keys, cap)
            for name, gradient in found.items():
                if gradient is None:
                    assert name.startswith(tuple(keys["freeze_module_prefix"]))
                    continue
                error = (gradient - gradients[name]).abs().max() / gradients[name].abs().max()
                assert error < 2e-5, (keys, cap, name, error)


def test_of_one_sequence_and_one_layer_the_loss_is_that_of_transformers(run_ranks, tmp_path):
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    folder = tiny_folder("qwen3_moe", tmp_path, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    [sample] = random_samples([13])
    logits = model(input_ids=sample.token_ids[None], use_cache=False, output_router_logits=True).router_logits
    wanted = load_balancing_loss_func(logits, NUM_EXPERTS, NUM_CHOSEN).item()
    [found] = run_ranks(aux_loss_of, 1, str(folder), [sample])
    assert found == pytest.approx(wanted, rel=1e-6)


def router_gradients(folder, samples, coef):
    """The reported loss, and the gradients of the routers' projections."""
    config = EngineConfig(router_aux_loss_coef=coef)
    engine = TrainEngine.build(Path(folder), config, device=CPU, optimizer=OptimizerConfig())
    step = pack(samples, num_shards=1, max_tokens=64)
    engine.forward_backward(step.shards[0], sft_loss, step.denominators)
    named = engine._model.hf_model.named_parameters()
    gradients = {name: p.grad.full_tensor().clone() for name, p in named if name.endswith("router.proj.weight")}
    loss = engine.optim_step().get("train/router/aux_loss")
    return None if loss is None else loss.result(), gradients


def test_of_a_router_that_gives_probabilities_they_are_those_of_the_loss(run_ranks, tmp_path):
    """Gemma 4's; by the definition, on what its projection gives."""
    from transformers import AutoModelForCausalLM

    save_model("gemma4_text", FAMILIES["gemma4_text"], tmp_path)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, **options).eval()
    samples, seen = random_samples([11, 7]), []
    for name, module in model.named_modules():
        if name.endswith("router.proj"):
            module.register_forward_hook(lambda _module, _args, scores: seen.append(scores.flatten(0, -2)))
    for sample in samples:
        model(input_ids=sample.token_ids[None], use_cache=False)
    losses = []
    for scores in seen:
        num_experts = scores.shape[1]
        shares = torch.nn.functional.one_hot(scores.topk(2).indices, num_experts).sum(1).double().mean(0)
        losses.append(num_experts * (shares * scores.softmax(-1).mean(0)).sum())
    wanted = sum(losses) / len(losses)
    wanted.backward()
    [(_, without)], [(found, gradients)] = (
        run_ranks(router_gradients, 1, str(tmp_path), samples, coef) for coef in (0.0, COEF)
    )
    assert found == pytest.approx(wanted.item(), rel=1e-5)
    assert len(gradients) == model.config.num_hidden_layers
    for name, gradient in gradients.items():
        expected = COEF * model.get_parameter(name).grad.float()
        torch.testing.assert_close(gradient - without[name], expected, rtol=1e-4, atol=1e-4 * expected.abs().max())


def aux_loss_of(folder, samples):
    engine = TrainEngine.build(
        Path(folder), EngineConfig(router_aux_loss_coef=COEF), device=CPU, optimizer=OptimizerConfig()
    )
    step = pack(samples, num_shards=1, max_tokens=64)
    engine.forward_backward(step.shards[0], sft_loss, step.denominators)
    metrics = engine.optim_step()
    engine.forward_backward(step.shards[0], sft_loss, step.denominators)
    engine.diagnose(step.shards[0], sft_loss, step.denominators)  # of a pass that is looked at nothing stays
    assert not any("router/" in name for name in engine.optim_step())
    assert sorted(name for name in metrics if "router/" in name) == [
        f"train/router/{name}" for name in ("aux_loss", "dead_experts", "max_violation", "worst_violation")
    ]
    return metrics["train/router/aux_loss"].result()


def router_metrics_and_gradient(folder, lora):
    """Of the gates of all layers; those of the frozen ones are left out."""
    config = EngineConfig(router_aux_loss_coef=COEF, router_metrics="layers", lora=lora)
    engine = TrainEngine.build(Path(folder), config, device=CPU, optimizer=OptimizerConfig())
    step = pack(random_samples(LENGTHS), num_shards=1, max_tokens=64)
    engine.forward_backward(step.shards[0], sft_loss, step.denominators)
    named = engine._model.hf_model.named_parameters()
    gates = [p.grad.full_tensor().clone() for name, p in named if ".gate." in name and p.grad is not None]
    metrics = {name: value.result() for name, value in engine.optim_step().items() if "router/" in name}
    return metrics, gates


@pytest.mark.parametrize("saved", ["gate", "mlp"])
def test_a_router_that_adapters_train_whole_counts_once(run_ranks, folder, saved):
    lora = LoraConfig(rank=2, target_modules=["q_proj"], modules_to_save=[saved])
    [(metrics, gates)] = run_ranks(router_metrics_and_gradient, 1, str(folder), lora)
    [(expected_metrics, expected)] = run_ranks(router_metrics_and_gradient, 1, str(folder), None)
    assert metrics == pytest.approx(expected_metrics)
    assert len(gates) == len(expected) == 2
    for found, gradient in zip(gates, expected, strict=True):
        torch.testing.assert_close(found, gradient)


def train_with_routers_that_give_no_logits(folder):
    """What the rank says, and the names of metrics of routers."""
    choose = Qwen3MoeTopKRouter.forward
    said = io.StringIO()
    with (
        patch.object(Qwen3MoeTopKRouter, "forward", lambda *args: (None, *choose(*args)[1:])),
        contextlib.redirect_stderr(said),
    ):
        engine = TrainEngine.build(Path(folder), EngineConfig(), device=CPU, optimizer=OptimizerConfig())
        step = pack(random_samples(LENGTHS), num_shards=dist.get_world_size(), max_tokens=64)
        engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
        metrics = engine.optim_step()
    assert metrics["train/grad_norm"].result() > 0
    return said.getvalue(), [name for name in metrics if "router/" in name]


def test_routers_that_cannot_be_read_count_nothing_where_nobody_asked(run_ranks, folder):
    """It is said once, and no metric is made of the others alone."""
    warning = (
        "warning: model.layers.0.mlp.gate cannot be read: Qwen3MoeTopKRouter does not give its logits; there will be "
        "no metrics train/router/ of the load of experts\n"
    )
    assert run_ranks(train_with_routers_that_give_no_logits, 2, str(folder)) == [(warning, []), ("", [])]
