from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from tiny_models import families, random_samples, reference_logprobs, tiny_folder
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.config import ConfigError, EngineConfig, FrozenEngineConfig, OptimizerConfig, TrainingError
from shardwise.data.packing import pack, unpack
from shardwise.engine import TrainEngine
from shardwise.recipes.losses import sft_loss

CPU = torch.device("cpu")
LENGTHS = [9, 7, 7, 3, 12]
"""Longest first a pack holds them as 12, 9, 7, 7, 3: a run of equal lengths in the middle."""


def fully_trained(samples):
    return [replace(s, loss_mask=torch.arange(len(s.token_ids)) > 0) for s in samples]


@pytest.fixture(scope="module", params=families("llama", "gemma2"))
def folder(request, tmp_path_factory):
    return tiny_folder(request.param, tmp_path_factory.mktemp(request.param))


def forward_packed(folder, versions, temperature, engine_config, max_tokens):
    """Of every version of the samples: logprobs and entropy per sample."""
    engine = TrainEngine.build(Path(folder), FrozenEngineConfig(**engine_config), device=CPU)
    results = []
    for samples in versions:
        step = pack(samples, num_shards=dist.get_world_size(), max_tokens=max_tokens)
        outputs = engine.forward(step.shards[dist.get_rank()], temperature=temperature, with_entropy=True)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, ([o.logprobs for o in outputs], [o.entropy for o in outputs]))
        results.append([unpack(step, [rank[field] for rank in everyone]) for field in (0, 1)])
    dtypes = {p.dtype for p in engine._model.parameters()}, any(p.requires_grad for p in engine._model.parameters())
    return results, dtypes


def test_trap_06_sequences_of_one_pack_never_see_each_other(run_ranks, folder):
    """Trap 6: with one token of one sequence changed, every other sequence keeps its bits."""
    samples = fully_trained(random_samples(LENGTHS))
    versions = [samples]
    for changed in range(len(samples)):
        tokens = samples[changed].token_ids.clone()
        tokens[1] = 3 + (tokens[1] - 3 + 50) % 97
        versions.append([replace(s, token_ids=tokens) if i == changed else s for i, s in enumerate(samples)])
    [(results, _)] = run_ranks(forward_packed, 1, str(folder), versions, 1.0, {}, 64)
    original = results[0][0]
    for changed in range(len(samples)):
        for index, logprobs in enumerate(results[1 + changed][0]):
            if index == changed:
                assert (logprobs[1:] != original[index][1:]).all()
            else:
                torch.testing.assert_close(logprobs, original[index], rtol=0, atol=0)


def test_no_token_sees_a_later_one(run_ranks, folder):
    samples = fully_trained(random_samples(LENGTHS))
    tokens = samples[4].token_ids.clone()
    tokens[8] = 3 + (tokens[8] - 3 + 50) % 97
    changed = [*samples[:4], replace(samples[4], token_ids=tokens)]
    [(results, _)] = run_ranks(forward_packed, 1, str(folder), [samples, changed], 1.0, {}, 64)
    before, after = results[0][0][4], results[1][0][4]
    torch.testing.assert_close(before[:8], after[:8], rtol=0, atol=0)
    assert (before[8:] != after[8:]).all()


@pytest.mark.parametrize("world_size", [1, 4])
def test_forward_gives_the_logprobs_and_entropy_of_each_sequence_alone(run_ranks, folder, world_size):
    """The packed sequences of some tokens, on every rank and at a temperature, equal Hugging Face's on one sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    samples = random_samples(LENGTHS)
    results = run_ranks(forward_packed, world_size, str(folder), [samples], 0.6, {}, 64 // world_size)
    for [(all_logprobs, all_entropy)], (dtypes, trains) in results:
        assert dtypes == {torch.float32}
        assert not trains
        for sample, logprobs, entropy in zip(samples, all_logprobs, all_entropy, strict=True):
            with torch.no_grad():
                expected = reference_logprobs(model, sample.token_ids, temperature=0.6)
                logits = model(input_ids=sample.token_ids[None]).logits[0].double() / 0.6
            distribution = logits.softmax(-1)
            entropies = torch.cat([torch.zeros(1), -(distribution * distribution.log()).sum(-1)[:-1]]).float()
            torch.testing.assert_close(logprobs, torch.where(sample.loss_mask, expected, 0.0), rtol=0, atol=1e-5)
            torch.testing.assert_close(entropy, torch.where(sample.loss_mask, entropies, 0.0), rtol=0, atol=1e-5)


def train(folder, param_dtype, num_steps, learning_rate):
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(param_dtype=param_dtype),
        device=CPU,
        optimizer=OptimizerConfig(learning_rate=learning_rate, adam_eps=1e-6),
        total_steps=num_steps,
    )
    before = {n: t.clone() for n, t in engine.named_weights(torch.float32)}
    step = pack(random_samples([9, 7, 7, 12, 4, 6]), num_shards=dist.get_world_size(), max_tokens=16)
    losses = []
    for _ in range(num_steps):
        metrics = engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
        gradient_dtypes = {p.grad.dtype for p in engine._model.parameters()}
        engine.optim_step()
        losses.append(metrics["train/loss"].result())
    weights = {n: t.clone() for n, t in engine.named_weights(torch.float32)}
    states = {v.dtype for state in engine._optimizer._adamw.state.values() for k, v in state.items() if k != "step"}
    masters = {p.dtype for p in engine._model.parameters()}
    return losses, before, weights, masters | gradient_dtypes | states


def test_trap_03_bfloat16_compute_keeps_float32_masters_and_follows_the_float32_loss(run_ranks, folder):
    """At a learning rate of 1e-6 nearly all weights still move; of bfloat16 masters 2 % would."""
    runs = {dtype: run_ranks(train, 2, str(folder), dtype, 4, 3e-3) for dtype in ("float32", "bfloat16")}
    losses = {dtype: [sum(x) for x in zip(*(r[0] for r in ranks), strict=True)] for dtype, ranks in runs.items()}
    assert losses["float32"][-1] < losses["float32"][0] - 0.05, (
        "the run must learn for the comparison to mean something"
    )
    for full, half in zip(losses["float32"], losses["bfloat16"], strict=True):
        assert abs(full - half) < 0.02 * full
        assert full != half, "bfloat16 must have had an effect"
    assert runs["bfloat16"][0][3] == {torch.float32}

    _, before, after, _ = run_ranks(train, 2, str(folder), "bfloat16", 1, 1e-6)[0]
    for name in before:
        if "norm" in name or "proj" in name:
            assert (before[name] != after[name]).float().mean() > 0.9, name


def test_frozen_engine_computes_in_bfloat16_and_scores_in_float32(run_ranks, folder):
    samples = fully_trained(random_samples(LENGTHS))
    full, half = (
        run_ranks(forward_packed, 2, str(folder), [samples], 1.0, {"param_dtype": dtype}, 32)[0]
        for dtype in ("float32", "bfloat16")
    )
    assert half[1] == ({torch.bfloat16}, False)
    full_logprobs, half_logprobs = torch.cat(full[0][0][0]), torch.cat(half[0][0][0])
    assert half_logprobs.dtype == torch.float32
    assert (full_logprobs - half_logprobs).abs().mean() < 0.05
    assert (full_logprobs != half_logprobs).any()


def poisoned_steps(folder, poisoned):
    """Takes one step per entry, its loss times NaN on rank 1 where poisoned; returns weights and metrics after each."""

    def nan_on_rank_1(outputs, batch, denominators):
        loss, metrics = sft_loss(outputs, batch, denominators)
        return loss * (float("nan") if dist.get_rank() == 1 else 1.0), metrics

    optimizer = OptimizerConfig(learning_rate=1e-2, max_nonfinite_steps=2)
    engine = TrainEngine.build(Path(folder), EngineConfig(), device=CPU, optimizer=optimizer, total_steps=9)
    step = pack(random_samples([9, 7]), num_shards=2, max_tokens=9)
    trail = [({n: t.clone() for n, t in engine.named_weights(torch.float32)}, {})]
    for is_poisoned in poisoned:
        loss_fn = nan_on_rank_1 if is_poisoned else sft_loss
        engine.forward_backward(step.shards[dist.get_rank()], loss_fn, step.denominators)
        metrics = {name: value.result() for name, value in engine.optim_step().items()}
        trail.append(({n: t.clone() for n, t in engine.named_weights(torch.float32)}, metrics))
    return trail


def test_nan_on_one_rank_skips_the_update_on_all_ranks(run_ranks, folder):
    """Trap 24. The skipped step leaves Adam untouched too: the steps after it are those of a run without it."""
    healthy = run_ranks(poisoned_steps, 2, str(folder), [False, False])
    for rank, trail in enumerate(run_ranks(poisoned_steps, 2, str(folder), [False, True, False])):
        assert [metrics.get("train/nonfinite_fraction") for _, metrics in trail[1:]] == [0.0, 1.0, 0.0]
        assert ["train/grad_norm" in metrics for _, metrics in trail[1:]] == [True, False, True]
        for name, weight in trail[1][0].items():
            assert torch.equal(trail[2][0][name], weight), name
            assert torch.equal(trail[3][0][name], healthy[rank][2][0][name]), name
            assert not torch.equal(trail[3][0][name], weight), name


def test_run_of_nonfinite_steps_ends_with_an_error_on_every_rank(run_ranks, folder):
    """One healthy step between two bad ones starts the count anew; the second in a row ends the run."""
    run_ranks(poisoned_steps, 2, str(folder), [True, False, True, False])
    with pytest.raises(RankError) as error:
        run_ranks(poisoned_steps, 2, str(folder), [False, True, True])
    message = "TrainingError: the gradient norm was nan in 2 optimizer steps in a row (trainer.max_nonfinite_steps=2)"
    assert str(error.value).count(message) == 2


def goes_on_after_an_error(folder):
    engine = TrainEngine.build(Path(folder), EngineConfig(), device=CPU, optimizer=OptimizerConfig())
    step = pack(random_samples([5, 4]), num_shards=1, max_tokens=16)

    def breaks_off(outputs, batch, denominators):
        raise ValueError("a loss of one's own")

    messages = []
    for loss in (breaks_off, sft_loss):
        try:
            engine.forward_backward(step.shards[0], loss, step.denominators)
        except (ValueError, TrainingError) as error:
            messages.append(str(error))
    return messages


def test_after_a_pass_that_ended_with_an_error_no_gradients_are_added_to_what_is_left(run_ranks, folder):
    ((first, second),) = run_ranks(goes_on_after_an_error, 1, str(folder))
    assert first == "a loss of one's own"
    assert second.startswith("an earlier forward_backward of this engine ended with an error, and what it left of grad")


def shares_of_the_loss(folder, lengths):
    engine = TrainEngine.build(Path(folder), EngineConfig(), device=CPU, optimizer=OptimizerConfig())
    step = pack(random_samples(lengths), num_shards=dist.get_world_size(), max_tokens=16)
    metrics = engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
    norm = engine.optim_step()["train/grad_norm"].result()
    return metrics["train/loss"].result(), norm, engine.num_parameters


def test_step_without_any_trained_token_has_loss_and_gradient_zero(run_ranks, folder):
    for lengths in ([], [1, 1, 1]):
        assert {result[:2] for result in run_ranks(shares_of_the_loss, 2, str(folder), lengths)} == {(0.0, 0.0)}


def score_with(folder, token, temperature):
    engine = TrainEngine.build(Path(folder), FrozenEngineConfig(), device=torch.device("cpu"))
    sample = random_samples([5])[0]
    sample.token_ids[3] = token
    engine.forward(pack([sample], num_shards=1, max_tokens=64).shards[0], temperature=temperature)


def test_trap_33_a_token_without_an_embedding_is_named(run_ranks, folder):
    with pytest.raises(RankError, match=r"DataError: the data have token 4000, and the model's vocabulary ends at \d+"):
        run_ranks(score_with, 1, str(folder), 4000, 1.0)


@pytest.mark.parametrize(
    ("token", "temperature", "told"),
    [
        (
            -100,
            1.0,
            "DataError: the data have token -100, and tokens begin at 0; one that",
        ),
        (5, 0.0, r"ValueError: temperature=0\.0: it has to be above 0"),
        (5, float("nan"), r"ValueError: temperature=nan: it has to be above 0"),
    ],
)
def test_padding_and_a_temperature_that_is_none_are_refused(run_ranks, folder, token, temperature, told):
    with pytest.raises(RankError, match=told):
        run_ranks(score_with, 1, str(folder), token, temperature)


def test_num_parameters_counts_the_whole_model_once(run_ranks, folder):
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert {result[2] for result in run_ranks(shares_of_the_loss, 2, str(folder), [5])} == {expected}


@pytest.mark.parametrize(
    ("config", "optimizer", "message"),
    [
        (
            EngineConfig(),
            None,
            "strategy=fsdp2_train needs an optimizer; trained engines are fsdp2_train, frozen ones fsdp2_infer",
        ),
        (
            FrozenEngineConfig(),
            OptimizerConfig(),
            "strategy=fsdp2_infer takes no optimizer; trained engines are fsdp2_train, frozen ones fsdp2_infer",
        ),
    ],
)
def test_strategy_and_optimizer_belong_together(config, optimizer, message):
    with pytest.raises(ConfigError) as error:
        TrainEngine.build(Path("nowhere"), config, device=CPU, optimizer=optimizer)
    assert str(error.value) == message


class Collectives(TorchDispatchMode):
    """Counts them by name. (CommDebugMode's notion of modules does not survive a second backward.)"""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def reduced_gradients(folder, engine_config):
    """Of two optimizer steps: the number of micro-batches, of collectives, and the whole gradient."""
    config = EngineConfig(**engine_config)
    engine = TrainEngine.build(Path(folder), config, device=CPU, optimizer=OptimizerConfig(learning_rate=1e-2))
    step = pack(random_samples([9, 7, 7, 5, 8, 6, 9, 4]), num_shards=dist.get_world_size(), max_tokens=9)
    results = []
    for _ in range(2):
        with Collectives() as mode:
            metrics = engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
        named = engine._model.hf_model.named_parameters()
        gradients = {name: p.grad.full_tensor().clone() for name, p in named}
        results.append((len(step.shards[0]), mode.counts, metrics["train/loss"].result(), gradients))
        engine.optim_step()
    return results


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [pytest.param(2, {}, id="fsdp", marks=pytest.mark.full), pytest.param(4, {"fsdp_size": 2}, id="hsdp")],
)
def test_gradients_reduced_once_a_step_equal_those_reduced_every_micro_batch(run_ranks, folder, world_size, layout):
    """Three units (two layers and the root): a reduction of each after every micro-batch, or after the last. Replicas
    are summed once a step either way."""
    each = run_ranks(reduced_gradients, world_size, str(folder), layout)
    once = run_ranks(reduced_gradients, world_size, str(folder), layout | {"reduce_gradients": "last_micro_batch"})
    for ours, theirs in zip(once, each, strict=True):
        for (num_batches, once_counts, loss, gradients), (_, each_counts, other_loss, expected) in zip(
            ours, theirs, strict=True
        ):
            assert num_batches > 1
            assert each_counts["_reduce_scatter_base_"] == 3 * num_batches
            assert once_counts["_reduce_scatter_base_"] == 3
            num_replica_sums = 3 if layout else 0
            assert each_counts["allreduce_"] == once_counts["allreduce_"] == num_replica_sums
            assert loss == pytest.approx(other_loss, rel=1e-6)
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6, msg=name)
                assert gradient.any(), name


def modes_and_shards(folder, reshard_after_forward):
    """Whether modules were in training mode, and whether parameters were whole: inside the last layer, and afterwards,
    for a forward, a step and a forward."""
    engine = TrainEngine.build(
        Path(folder),
        EngineConfig(reshard_after_forward=reshard_after_forward),
        device=CPU,
        optimizer=OptimizerConfig(),
    )
    hf_model = engine._model.hf_model
    step = pack(random_samples([9, 7]), num_shards=2, max_tokens=9)
    batches = step.shards[dist.get_rank()]

    def whole(module):
        return [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]

    inside = []
    hf_model.model.norm.register_forward_hook(
        lambda module, *_: inside.append((bool(whole(hf_model.model.layers[0])), bool(whole(module))))
    )
    afterwards = []
    for run in (
        lambda: engine.forward(batches),
        lambda: engine.forward_backward(batches, sft_loss, step.denominators),
        lambda: engine.forward(batches),
    ):
        run()
        afterwards.append(whole(engine._model))
    return inside, afterwards, any(module.training for module in engine._model.modules())


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_units_hold_only_their_shards_between_passes(run_ranks, folder, reshard_after_forward):
    """While the final norm runs the root is whole; a layer before it is, where units are kept for a backward pass that
    never follows a plain forward."""
    kept = not reshard_after_forward
    for inside, afterwards, is_training in run_ranks(modes_and_shards, 2, str(folder), reshard_after_forward):
        assert inside == [(kept, True)] * 3
        assert afterwards == [[], [], []]
        assert not is_training, "dropout and router noise would make two passes over the same tokens differ"


def losses_of_one_batch(folder):
    """The same batch three times, without an optimizer step in between."""
    engine = TrainEngine.build(Path(folder), EngineConfig(), device=CPU, optimizer=OptimizerConfig())
    step = pack(random_samples([9, 7, 5]), num_shards=1, max_tokens=32)
    return [
        engine.forward_backward(step.shards[0], sft_loss, step.denominators)["train/loss"].result() for _ in range(3)
    ]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("opt", {"dropout": 0.5, "attention_dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32}),
        (
            "phimoe",
            {
                "num_local_experts": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 48,
                "router_jitter_noise": 0.3,
                "attention_dropout": 0.0,
            },
        ),
    ],
)
def test_two_training_passes_over_the_same_tokens_are_the_same_bits(run_ranks, tmp_path, family, options):
    """OPT drops activations by a function, not a module; PhiMoE draws its routing while it trains."""
    common = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **common, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (losses,) = run_ranks(losses_of_one_batch, 1, str(tmp_path))
    assert losses[0] > 1
    assert losses == [losses[0]] * 3


def build_with(folder, options):
    TrainEngine.build(Path(folder), EngineConfig(**options), device=CPU, optimizer=OptimizerConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_implementation": "varlen"}, "varlen cannot compute tensors on the CPU; set it to auto or loop"),
        (
            {
                "module_precision": [
                    {"module": "model.layers.*.mlp", "param_dtype": "bfloat16", "cast_forward_inputs": False}
                ]
            },
            r"engine\.module_precision does not fit the model: .* need cast_forward_inputs=true",
        ),
        ({"module_precision": [{"module": "model.layers"}]}, "model.layers matches no module of"),
        (
            {"wrap_policy": {"transformer_layer_cls_to_wrap": ["ModuleList"]}},
            r"transformer_layer_cls_to_wrap: ModuleList matches no module of",
        ),
    ],
    ids=["kernel", "inputs", "container", "container class"],
)
def test_what_the_model_cannot_compute_is_refused_when_it_is_built(run_ranks, tmp_path, options, message):
    with pytest.raises(RankError, match=message):
        run_ranks(build_with, 1, str(tiny_folder("qwen3", tmp_path)), options)


def train_once(folder, options):
    engine = TrainEngine.build(Path(folder), EngineConfig(**options), device=CPU, optimizer=OptimizerConfig())
    step = pack(random_samples([9, 7, 5]), num_shards=1, max_tokens=32)
    return engine.forward_backward(step.shards[0], sft_loss, step.denominators)["train/loss"].result()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_experts_whose_rows_grouped_mm_cannot_read_are_refused_with_what_can(run_ranks, tmp_path, dtype):
    """12 values of 2 bytes."""
    folder = str(tiny_folder("qwen3_moe", tmp_path, moe_intermediate_size=12))
    message = (
        rf"ConfigError: engine\.param_dtype={dtype}: grouped_mm cannot compute model\.layers\.0\.mlp\.experts\."
        r"down_proj \(.*\); it needs rows of a multiple of 16 bytes\. Set engine\.experts_implementation to eager or "
        "batched_mm, or leave it out"
    )
    options = {"param_dtype": dtype}
    with pytest.raises(RankError, match=message):
        run_ranks(build_with, 1, folder, options | {"experts_implementation": "grouped_mm"})
    (whole,) = run_ranks(train_once, 1, folder, {})
    below = {"module_precision": [{"module": "model.layers.*.mlp", "param_dtype": dtype}]}
    (of_modules,) = run_ranks(train_once, 1, folder, below)
    assert of_modules == pytest.approx(whole, rel=2e-2)
    for implementation in ("eager", "batched_mm", None):
        (loss,) = run_ranks(train_once, 1, folder, options | {"experts_implementation": implementation})
        assert loss == pytest.approx(whole, rel=1e-2)


def poisoned_tensors(folder, optimizer):
    """What each rank finds: before a step, after one, and with NaN in a state on rank 1 and in a weight on rank 0."""
    engine = TrainEngine.build(
        Path(folder), EngineConfig(), device=CPU, optimizer=OptimizerConfig(optimizer=optimizer), total_steps=1
    )
    found = [engine.nonfinite_tensors()]
    step = pack(random_samples(LENGTHS), num_shards=2, max_tokens=64)
    engine.forward_backward(step.shards[dist.get_rank()], sft_loss, step.denominators)
    engine.optim_step()
    found.append(engine.nonfinite_tensors())
    tensors = engine._optimizer.named_tensors()
    name = "exp_avg/model.norm.weight" if dist.get_rank() == 1 else "master/model.layers.1.mlp.up_proj.weight"
    tensors[name].to_local()[-1] = float("inf")
    return [*found, engine.nonfinite_tensors()]


def test_every_rank_names_the_weights_and_states_of_which_its_part_is_not_finite(run_ranks, tmp_path):
    first, second = run_ranks(poisoned_tensors, 2, str(tiny_folder("llama", tmp_path)), "adamw")
    assert first == [[], [], ["model.layers.1.mlp.up_proj.weight"]]
    assert second == [[], [], ["exp_avg/model.norm.weight"]]
