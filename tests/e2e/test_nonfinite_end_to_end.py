"""A run that cannot go on, and `shardwise replay` of what it left."""

import shutil

from safetensors.torch import load_file, save_file

WEIGHT = "model.layers.0.mlp.up_proj"


def test_trap_24_a_run_that_diverges_skips_counts_stops_and_leaves_what_replays_it(
    assets, command, metrics_of, tmp_path
):
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(assets.model, model)
    weights = load_file(model / "model.safetensors")
    weights[f"{WEIGHT}.weight"][40] = 3e38  # finite, as what is loaded must be; no output is
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    done = command(
        "sft",
        f"model.path={model}",
        f"data.train_files={assets.sft}",
        "data.max_train_rows=32",
        "data.max_sequence_tokens=64",
        "engine.max_tokens_per_micro_batch=96",
        "trainer.total_steps=4",
        "trainer.batch_size=8",
        "trainer.max_nonfinite_steps=2",
        "trainer.tensorboard=false",
        f"trainer.output_dir={run}",
    )
    assert done.code == 2, done.err
    assert "error: the gradient norm was nan in 2 optimizer steps in a row (trainer.max_nonfinite_steps=2)" in done.err
    assert [row["train/nonfinite_fraction"] for row in metrics_of(run)] == [1.0]  # step 1; step 2 ended the run
    bundle = run / "nonfinite" / "step_1"
    assert [path.name for path in bundle.parent.iterdir()] == ["step_1"]
    assert f"`shardwise replay {bundle}` runs it again" in done.err
    again = command("replay", str(bundle))
    assert again.code == 0, again.err
    assert "optimizer step 1 of policy on 1 rank;" in again.out
    assert f"forward: the output of {WEIGHT} has " in again.out
    assert "  row sft_train.jsonl line " in again.out
    assert again.out.endswith("\nreproduced\n")
    missing = command("replay", str(run))
    assert (missing.code, missing.out) == (2, "")
    assert missing.err.startswith(f"error: {run} is no bundle: it has no bundle.json; name a folder in nonfinite/ of ")
