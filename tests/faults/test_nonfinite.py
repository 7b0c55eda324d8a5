"""A loss or gradient that is not finite: every rank skips the update, and what replays the step is kept."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from bad_steps import DOWN, bits_of, build, parameters_of, samples, train
from safetensors.torch import load_file

from shardwise.config import CriticConfig, EngineConfig, LoraConfig
from shardwise.data.synthetic import build_model_folder, train_tokenizer
from shardwise.engine.nonfinite import LOSS
from shardwise.engine.shards import local_box
from shardwise.recipes.bundles import BUNDLE, Bundle
from shardwise.recipes.losses import LossSource
from shardwise.recipes.replay import replay, run_again

CPU = torch.device("cpu")
PAIR_LOSSES = '''
import torch
import torch.distributed as dist

def losses_of(scores, is_bad):
    """NaN where it is bad, with the gradient that it has elsewhere."""
    losses = -torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1])
    return losses + torch.where(is_bad, float("nan"), 0.0), {}

def bad_for_seven(scores, margins):
    return losses_of(scores, margins == 7)

def bad_on_rank_1(scores, margins):
    return losses_of(scores, torch.full_like(margins, dist.get_rank()) == 1)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Qwen3 of 261 byte tokens with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    build_model_folder(
        folder, tokenizer=tokenizer, hidden_size=32, num_layers=2, intermediate_size=64, max_position_embeddings=96
    )
    return folder


def step_on_two_ranks(folder, bundle, options, poison, loss, rewards):
    """(nonfinite fraction, loss share, whether every bit of the weights stayed) of a step."""
    worker = build(folder, engine=EngineConfig(**options), head="sequence_scores" if loss else "logprobs")
    if loss:
        source = LossSource(kind="reward_model", config=json.dumps({"name": "custom", "function": loss}))
        worker.use_loss("policy", source.model_dump_json())
    if poison == "backward":
        model = worker.engines["policy"].engine._model.hf_model
        model.get_submodule(DOWN).register_full_backward_hook(lambda _, grads, __: (grads[0] * math.nan,))
    elif poison:
        local = parameters_of(worker)[poison].data.to_local()
        if "lora" in options:  # a new adapter's output is 0 whatever is dropped
            local.fill_(0.5)
        if dist.get_rank() == 1 or options.get("fsdp_size") == 1:
            local[-1, 0] = math.nan
    before = bits_of(worker)
    metrics = train(
        worker,
        bundle,
        rewards=rewards,
        keep_together=2 if loss else 1,
        ulysses_size=options.get("ulysses_size", 1),
    )
    after = bits_of(worker)
    return (
        metrics["train/nonfinite_fraction"],
        metrics["train/loss"],
        all(map(torch.equal, before.values(), after.values())),
    )


def skipped(run_ranks, folder, tmp_path, *, options=None, poison="", loss="", rewards=(0.0, 0.0, 0.0, 0.0)):
    """The bundle of a step that both ranks skipped, with every weight as it was."""
    bundle = tmp_path / "nonfinite" / "step_1"
    results = run_ranks(step_on_two_ranks, 2, str(folder), str(bundle), options or {}, poison, loss, rewards)
    assert [(fraction, kept) for fraction, _, kept in results] == [(1.0, True)] * 2
    return bundle


def test_trap_24_a_bad_weight_is_named_and_replayed_on_one_process(run_ranks, folder, tmp_path, alone, capsys):
    path = skipped(run_ranks, folder, tmp_path, poison=f"{DOWN}.weight")
    assert sorted(file.name for file in path.parent.iterdir()) == ["step_1"]
    files = [BUNDLE, "hf", "manifest.json", "rank_0.safetensors", "rank_1.safetensors"]
    assert sorted(file.name for file in path.iterdir()) == files
    bundle = Bundle.read(str(path))
    assert [(rank, fault.micro_batch, fault.phase, fault.module) for rank, fault in bundle.step.faults] == [
        (0, 0, "forward", DOWN),
        (1, 0, "forward", DOWN),
    ]
    assert math.isnan(bundle.step.grad_norm)
    uids = [uid for batch in bundle.micro_batches() for uid in batch.tokens.uids]
    assert sorted(uids) == [sample.uid for sample in samples()]
    stored, given = (load_file(one / "model.safetensors") for one in (path / "hf", folder))
    for name, weight in given.items():
        differs = (stored[name] != weight).nonzero().tolist()
        assert differs == ([[31, 0]] if name == f"{DOWN}.weight" else []), name

    capsys.readouterr()
    assert replay(str(path), CPU)
    out = capsys.readouterr().out
    assert "step_1: optimizer step 1 of policy on 2 ranks; 2 micro-batches of 30 tokens, loss sft\n" in out
    assert f"first in rank 0, micro-batch 0: {bundle.step.faults[0][1]}\n" in out
    assert "gradient norm nan (recorded nan)\n" in out
    assert out.endswith("\nreproduced\n")


@pytest.mark.parametrize("function", ["bad_for_seven", "bad_on_rank_1"])
def test_f33_trap_24_a_loss_that_is_nan_on_one_rank_with_a_finite_gradient_is_skipped_by_both(
    run_ranks, folder, tmp_path, alone, capsys, function
):
    """What comes of the data comes again on one process; what comes of the second rank does not."""
    (tmp_path / "rules.py").write_text(PAIR_LOSSES)
    loss = f"{tmp_path / 'rules.py'}:{function}"
    path = skipped(run_ranks, folder, tmp_path, loss=loss, rewards=(1.0, 0.0, 7.0, 0.0))
    step = Bundle.read(str(path)).step
    [(bad, fault)] = step.faults
    assert (fault.phase, fault.module, fault.shape, fault.num_nan) == ("loss", LOSS, [], 1)
    losses = [rank.micro_batches[0].loss for rank in step.ranks]
    assert [math.isnan(loss) for loss in losses] == [rank == bad for rank in (0, 1)]
    capsys.readouterr()
    if function == "bad_for_seven":
        assert replay(str(path), CPU)
        out = capsys.readouterr().out
        assert f"rank {bad}, micro-batch 0: loss nan (recorded nan)\n" in out
        assert "  row rows.jsonl:3, ends in " in out
    else:
        assert bad == 1
        assert not replay(str(path), CPU)
        assert "\nnot reproduced (the loss of rank 1, micro-batch 0 was nan, here 0." in capsys.readouterr().out


def test_trap_24_a_backward_that_goes_bad_is_named_and_found_gone_without_its_cause(
    run_ranks, folder, tmp_path, alone, capsys
):
    path = skipped(run_ranks, folder, tmp_path, poison="backward")
    [(rank, fault), *_] = Bundle.read(str(path)).step.faults
    assert (rank, fault.phase, fault.module) == (0, "backward", DOWN)
    capsys.readouterr()
    assert not replay(str(path), CPU)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not reproduced")]
    assert line.startswith("not reproduced (the gradient norm was nan, here ")
    assert f"; the first fault was backward: the gradient that {DOWN} gives back has " in line
    assert line.endswith(", here none)")


@pytest.mark.parametrize(
    "options",
    [{"ulysses_size": 2, "activation_checkpointing": "full"}, {"fsdp_size": 1, "reduce_gradients": "last_micro_batch"}],
    ids=["sequences shared", "replicas"],
)
def test_a_bundle_of_another_layout_replays_too(run_ranks, folder, tmp_path, alone, options):
    path = skipped(run_ranks, folder, tmp_path, options=options, poison=f"{DOWN}.weight")
    assert Bundle.read(str(path)).step.faults[0][1].module == DOWN
    assert replay(str(path), CPU)


def step_with_a_bad_token_of_rank_1(folder, bundle):
    """Of a critic, whose embedding is no projection too; the token ends the last row."""
    worker = build(folder, engine=EngineConfig(ulysses_size=2), head="token_values")
    worker.use_loss("policy", LossSource.of("value", CriticConfig()).model_dump_json())
    rows = parameters_of(worker)["model.embed_tokens.weight"].data
    place = int(samples()[-1].token_ids[-1]) - local_box(rows)[0].start
    if 0 <= place < len(rows.to_local()):
        rows.to_local()[place] = math.inf
    train(worker, bundle, values=True, ulysses_size=2)


def test_where_ranks_share_a_sequence_the_module_is_named_where_it_began(run_ranks, folder, tmp_path, alone, capsys):
    """Rank 0 hears of the one bad token in the attention."""
    path = tmp_path / "step_1"
    run_ranks(step_with_a_bad_token_of_rank_1, 2, str(folder), str(path))
    step = Bundle.read(str(path)).step
    met = [(rank, fault.micro_batch, fault.module) for rank, fault in step.faults]
    assert met == [(1, 1, "model.embed_tokens"), (0, 1, "model.layers.0.self_attn.o_proj")]
    capsys.readouterr()
    assert replay(str(path), CPU)
    assert "first in rank 0, micro-batch 1: forward: the output of model.embed_tokens" in capsys.readouterr().out


def test_adapters_alone_are_kept_and_their_dropout_is_drawn_again(run_ranks, folder, tmp_path, alone):
    lora = LoraConfig(rank=4, dropout=0.4, target_modules=["q_proj"]).model_dump()
    name = "model.layers.0.self_attn.q_proj.lora_B.default"
    path = skipped(run_ranks, folder, tmp_path, options={"lora": lora}, poison=f"{name}.weight")
    assert (path / "adapter").is_dir()
    assert not (path / "hf").exists()
    bundle = Bundle.read(str(path))
    recorded = [(fault.module, fault.num_nan, fault.max_abs) for _, fault in bundle.step.faults]
    assert [module for module, *_ in recorded] == [name] * 2
    found = run_again(bundle, bundle.micro_batches(), CPU).faults
    assert [(fault.module, fault.num_nan, fault.max_abs) for fault in found] == recorded
    assert replay(str(path), CPU)
