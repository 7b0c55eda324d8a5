"""F33, F34, trap 24: a NaN in the loss, a gradient, a weight, a reward or a logprob of one rank. All ranks agree before
the update; the step is skipped, counted and kept for a replay, and after so many in a row the run stops."""

import json
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bad_steps import bits_of, build, train
from ranks import call_store
from safetensors.torch import load_file
from small_run import run_steps

from shardwise.config import EngineConfig, RLConfig, TrainingError
from shardwise.controller.local import RankGroup, serve, serve_in_background
from shardwise.controller.process_group import Rank, connect
from shardwise.fault_plan import begin_plan, plan
from shardwise.recipes.bundles import Bundle
from shardwise.recipes.checkpointing.checkpoint_writer import CheckpointWriter
from shardwise.recipes.rank.worker import Worker
from shardwise.recipes.rl import train as train_rl

CPU = torch.device("cpu")


def planned(function, faults, rank, *args):
    """Calls it with faults on one rank. Returns what it returns, or the error of training."""
    begin_plan(faults if dist.get_rank() == rank else [])
    try:
        return function(*args)
    except TrainingError as error:
        if dist.get_rank() != 0:
            serve(None, dist.group.WORLD)  # what rank 0 still has to say
        return f"TrainingError: {error}"
    finally:
        plan.cache_clear()


def sft_run(run, model, options):
    return run_steps(run, model, **options)


def rl_run(tree):
    """The recipe on this rank."""
    config = RLConfig.parse(tree, origin="test")
    control, rank = dist.group.WORLD, Rank(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    links = connect("background", rank, call_store(), timeout=timedelta(seconds=30))
    writer = CheckpointWriter(rank.rank, links)
    worker = Worker(CPU, writer=writer)
    if rank.rank != 0:
        writing = serve_in_background(writer, links, lambda _: None)
        serve(worker, control)
        writing.join()
        return
    background = RankGroup(writer, links, timeout_seconds=30)
    group = RankGroup(worker, control, timeout_seconds=30, background=background)
    try:
        train_rl(config, group)
    finally:
        group.shutdown()


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_of(run, step):
    return load_file(run / "checkpoints" / f"step_{step}" / "hf" / "model.safetensors")


def are_equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("phase", "rank"), [pytest.param("backward", 0, marks=pytest.mark.full), ("backward", 1), ("allreduce", 1)]
)
def test_f33_a_nan_on_one_rank_skips_its_step_on_all_and_the_second_in_a_row_ends_the_run(
    run_ranks, model_folder, tmp_path, alone, phase, rank
):
    run = tmp_path / "run"
    faults = [f"step={step} phase={phase} action=nan" for step in (2, 4, 5)]
    options = {"save_every_steps": 1, "max_nonfinite_steps": 2}
    (steps, error, said), other = run_ranks(planned, 2, sft_run, faults, rank, str(run), str(model_folder), options)
    assert steps == [1, 2, 3, 4, 5]
    assert error == other
    assert error.startswith("TrainingError: the gradient norm was nan in 2 optimizer steps in a row")
    assert [row["train/nonfinite_fraction"] for row in rows_of(run)] == [0, 1, 0, 1]
    bad = 0.5 if phase == "backward" else 0  # the loss of one of two micro-batches, or a gradient alone
    assert [row["train/nonfinite_loss_fraction"] for row in rows_of(run)] == [0, bad, 0, bad]
    weights = {step: weights_of(run, step) for step in (1, 2, 3, 4)}
    assert [are_equal(weights[step], weights[step + 1]) for step in (1, 2, 3)] == [True, False, True]
    assert sorted(path.name for path in (run / "nonfinite").iterdir()) == ["step_2", "step_4"]
    for step in (2, 4):
        assert (
            f"optimizer step {step} of policy was skipped: the gradient norm was nan, and a second pass found" in said
        )
        ranks = Bundle.read(str(run / "nonfinite" / f"step_{step}")).step.ranks
        losses = [micro_batch.loss for record in ranks for micro_batch in record.micro_batches]
        assert [loss != loss for loss in losses] == [phase == "backward" and rank == place for place in (0, 1)]


@pytest.mark.parametrize("on_save_error", ["continue", "stop"])
def test_f34_a_weight_that_goes_bad_is_named_never_saved_and_ends_the_run(
    run_ranks, model_folder, tmp_path, alone, on_save_error
):
    """It stays bad: every later step is skipped."""
    run = tmp_path / "run"
    options = {"max_nonfinite_steps": 3, "on_save_error": on_save_error}
    faults = ["step=3 phase=forward action=nan"]
    (steps, error, said), _ = run_ranks(planned, 2, sft_run, faults, 1, str(run), str(model_folder), options)
    not_saved = "the checkpoint of step 4 was not saved: model.embed_tokens.weight of the policy hold NaN or infinities"
    if on_save_error == "stop":
        assert steps == [1, 2, 3, 4]
        assert error.startswith(f"NotFiniteError: {not_saved}")
    else:
        assert steps == [1, 2, 3, 4, 5]
        assert f"warning: {not_saved}" in said
        assert error.startswith("TrainingError: the gradient norm was nan in 3 optimizer steps in a row")
    assert [row["train/nonfinite_fraction"] for row in rows_of(run)] == [0, 0, 1, 1]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step_2"]
    assert all(weight.isfinite().all() for weight in weights_of(run, 2).values())
    assert "optimizer step 3 of policy was skipped: rank 0, micro-batch 0: forward: the output of lm_head has" in said
    step = Bundle.read(str(run / "nonfinite" / "step_3")).step
    assert [(rank, fault.phase, fault.module) for rank, fault in step.faults] == [
        (rank, "forward", "lm_head") for rank in (0, 1)
    ]


def step_of_replicas(folder):
    """(share of steps skipped, whether the weights stayed, NaN in them) of two steps."""
    worker = build(folder, engine=EngineConfig(fsdp_size=1))
    rows = []
    for _ in range(2):
        before = bits_of(worker)
        fraction = train(worker)["train/nonfinite_fraction"]
        after = bits_of(worker)
        changed = [name for name, bits in before.items() if not torch.equal(bits, after[name])]
        rows.append((fraction, changed, worker.nonfinite_tensors("policy")))
    return rows


def test_f34_replicas_agree_on_a_weight_that_is_bad_in_one_of_them(run_ranks, model_folder):
    """FSDP sums replicas' gradients and never looks at their weights."""
    name = "model.embed_tokens.weight"
    first, second = run_ranks(planned, 2, step_of_replicas, ["phase=forward action=nan nth=2"], 1, str(model_folder))
    assert [row[0] for row in first] == [row[0] for row in second] == [0, 1]
    assert first[1][1:] == ([], [])
    assert second[1][1:] == ([name], [name])


def rl_tree(assets, run, algorithm):
    return {
        "model": {"path": str(assets.model)},
        "data": {"train_files": str(assets.parquet), "max_prompt_tokens": 40},
        "engine": {"max_tokens_per_micro_batch": 128},
        "rollout": {"num_prompts": 2, "group_size": 2, "max_response_tokens": 4},
        "reward": {"functions": assets.reward},
        "algorithm": algorithm,
        "trainer": {"output_dir": str(run), "total_steps": 3, "save_every_steps": 1, "tensorboard": False},
    }


@pytest.mark.parametrize(
    ("rank", "algorithm"),
    [
        pytest.param(1, {"kl_coef": 0.1}, id="of the reference"),
        pytest.param(0, {"num_minibatches": 2}, id="of the policy before", marks=pytest.mark.full),
    ],
)
def test_f33_a_logprob_that_is_nan_skips_the_updates_that_it_reaches(run_ranks, assets, tmp_path, rank, algorithm):
    run = tmp_path / "run"
    run_ranks(planned, 2, rl_run, ["step=2 phase=logprob action=nan"], rank, rl_tree(assets, run, algorithm))
    num_updates = algorithm.get("num_minibatches", 1)
    assert [row["train/nonfinite_fraction"] for row in rows_of(run)] == [0, 1 / num_updates, 0]
    weights = {step: weights_of(run, step) for step in (1, 2, 3)}
    assert all(weight.isfinite().all() for step in weights for weight in weights[step].values())
    assert are_equal(weights[1], weights[2]) == (num_updates == 1)
    assert not are_equal(weights[2], weights[3])
    assert [path.name for path in (run / "nonfinite").iterdir()] == ["step_2"]


def test_f33_a_reward_that_is_nan_is_named_with_its_row_and_ends_the_run_before_it_learns(run_ranks, assets, tmp_path):
    run = tmp_path / "run"
    error, _ = run_ranks(planned, 2, rl_run, ["step=2 phase=reward action=nan"], 0, rl_tree(assets, run, {}))
    assert re.match(
        r"TrainingError: algorithm\.advantage=grpo gave nan for row verl\.parquet row \d+, token \d+ \(reward nan, .*\)"
        "; a reward, logprob or value of its group is not finite",
        error,
    )
    assert [row["step"] for row in rows_of(run)] == [1]
