"""`shardwise rl` with vLLM as the rollout engine: a policy that learns, in full and through adapters, and survives."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from shardwise.data.synthetic import arithmetic_problems, build_model_folder, train_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ROOT = Path(__file__).parents[2]
STEPS, MAX_TOKENS = 15, 8
VLLM = {"type": "vllm", "args": {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 25}}
REWARD = f'''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of digits in the longest answer that there may be."""
    return sum(char.isdigit() for char in solution_str) / {MAX_TOKENS}
'''


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """`config_of(name, **trainer)`: a YAML file of GRPO on a random model, sampled by vLLM."""
    folder = tmp_path_factory.mktemp("vllm")
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    build_model_folder(
        folder / "model",
        tokenizer=tokenizer,
        hidden_size=64,
        num_layers=2,
        num_attention_heads=2,  # heads of 32, the smallest that vLLM's CPU kernels know
        num_key_value_heads=1,
        intermediate_size=96,
        max_position_embeddings=96,
    )
    _save_sure_of_itself(folder / "model", folder / "sure")
    files = arithmetic_problems(folder / "data", seed=0, num_held_out=24)
    (folder / "rules.py").write_text(REWARD)

    def write(name: str, *, model="model", engine=None, rollout=None, **trainer) -> Path:
        config = {
            "model": {"path": str(folder / model)},
            "data": {"train_files": str(files.rl_train), "max_prompt_tokens": 40},
            "engine": {"max_tokens_per_micro_batch": 512, **(engine or {})},
            "rollout": {
                "engine": VLLM,
                "num_prompts": 8,
                "group_size": 8,
                "max_response_tokens": MAX_TOKENS,
                **(rollout or {}),
            },
            "reward": {"functions": f"{folder / 'rules.py'}:compute_score"},
            "trainer": {
                "output_dir": str(folder / name),
                "total_steps": STEPS,
                "learning_rate": 1e-2,
                "save_every_steps": 5,
                "tensorboard": False,
                **trainer,
            },
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        return folder / f"{name}.yaml"

    return write


def _save_sure_of_itself(model: Path, target: Path) -> None:
    """Larger embeddings, which are the head too: logits that adapters in between can move far enough."""
    opened = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        opened.get_input_embeddings().weight.mul_(5)
    opened.save_pretrained(target)
    for file in model.glob("*tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())
    template = model / "chat_template.jinja"
    if template.is_file():
        (target / template.name).write_bytes(template.read_bytes())


def rewards(rows) -> list[float]:
    return [row["reward/mean"] for row in rows]


@pytest.fixture(scope="module")
def learned(config_of, shell):
    """Two ranks, each with an engine of its own."""
    config = config_of("full")
    done = shell("shardwise", "rl", "--nproc", "2", "-c", str(config), timeout=400)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return config.with_suffix("")


def test_grpo_on_two_ranks_learns_and_both_engines_agree_with_the_trainer(learned, metrics_of):
    """From 5 % of digits to nearly all; the embedded engine takes the same policy from 5 to 89 %."""
    rows = metrics_of(learned)
    assert rewards(rows)[0] < 0.1
    assert rewards(rows)[-1] > 0.7
    for row in rows:
        assert row["rollout/logprob_abs_diff_max"] < 2e-5
        assert row["reward/failed"] == 0.0


def test_parity_finds_the_trained_policy_the_same_in_vllm(learned, shell):
    done = shell("shardwise", "parity", str(learned), "--engine", "vllm", "--max-tokens", "8", timeout=200)
    assert done.code == 0, done.err
    assert "trainer and vllm rollout engine in float32" in done.out
    assert done.out.endswith("the same: within the bounds of float32, 0.001 on average and 0.01 for a token\n")


def test_grpo_with_adapters_learns_because_the_merged_weights_reach_the_engine(config_of, shell, metrics_of):
    config = config_of("adapters", model="sure", engine={"lora": {"rank": 16}}, total_steps=16)
    done = shell("shardwise", "rl", "-c", str(config), timeout=400)
    assert done.code == 0, done.err
    rows = metrics_of(config.with_suffix(""))
    assert rewards(rows)[0] < 0.05
    assert rewards(rows)[-1] > 0.25
    assert max(row["rollout/logprob_abs_diff_max"] for row in rows) < 2e-5


@pytest.mark.parametrize("adapters", [{}, {"rank": 16}], ids=["whole models", "adapters alone"])
def test_ranks_that_are_one_engine_together_sample_what_one_rank_does(
    config_of, shell, metrics_of, monkeypatch, adapters
):
    """Tensor parallel over the ranks that train. Two ranks share a machine with one NUMA node only where they are told
    their cores."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    found = {}
    for size in (1, 2):
        rollout = {"engine": {**VLLM, "args": {**VLLM["args"], "tensor_parallel_size": size}}, "probe_every_syncs": 1}
        engine = {}
        if adapters:
            rollout["sync_adapter_only"], engine["lora"] = True, adapters
        name = f"{size}-{len(adapters)}"
        config = config_of(f"cut-{name}", model="sure", engine=engine, rollout=rollout, total_steps=3)
        done = shell("shardwise", "rl", "--nproc", str(size), "-c", str(config), timeout=400)
        assert done.code == 0, done.err
        assert "leaked shared_memory" not in done.err
        found[size] = metrics_of(config.with_suffix(""))
        assert not list(Path("/dev/shm").glob("*cpushm*")), "else the next engine of two ranks could not start"
    assert rewards(found[2]) == rewards(found[1])
    for one, two in zip(found[1], found[2], strict=True):
        assert two["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)
        assert two["rollout/logprob_abs_diff_max"] < 2e-5
        assert two.get("sync/probe_max_difference", 0.0) < 2e-5
        share = two["sync/bytes"] / one["sync/bytes"]
        assert share == 1 if adapters else 0.5 < share < 0.6, "of a whole model a rank is sent what it computes with"


def test_adapters_that_are_synced_alone_and_interrupted_completions_train_as_the_probe_says(
    config_of, shell, metrics_of
):
    """One rank trains, one samples with vLLM in a process of its own, a step ahead; new adapters do not wait."""
    rollout = {
        "engine": VLLM | {"process": {}},
        "placement": "split",
        "max_staleness": 1,
        "partial": True,
        "sync_adapter_only": True,
        "probe_every_syncs": 1,
        "max_concurrent_sequences": 4,
    }
    config = config_of("alone", model="sure", engine={"lora": {"rank": 16}}, rollout=rollout, total_steps=4)
    done = shell("shardwise", "rl", "--nproc", "2", "-c", str(config), timeout=400)
    assert done.code == 0, done.err
    rows = metrics_of(config.with_suffix(""))
    assert max(row["staleness/interrupted"] for row in rows) > 0
    assert max(row["sync/probe_max_difference"] for row in rows if "sync/probe_max_difference" in row) < 2e-5
    assert {row["sync/bytes"] for row in rows} == {rows[0]["sync/bytes"]}


def test_a_run_whose_engine_was_killed_goes_on_to_the_same_end(learned, config_of, marked, metrics_of, tmp_path):
    """kill -9 of the rank that hosts an engine: the other is stopped, the launcher names it within 15 seconds, and the
    same command finishes the run as if nothing had been."""
    config = config_of("killed")
    folder = config.with_suffix("")
    command = [sys.executable, "-m", "shardwise", "rl", "--nproc", "2", "-c", str(config)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "SHARDWISE_TEST_MARK": str(tmp_path)}
    with (tmp_path / "stderr").open("w") as stderr:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
        deadline = time.monotonic() + 300
        while _num_rows(folder) < 6 and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        (victim,) = [pid for pid in marked(str(tmp_path)) if _rank(pid) == "1" and _parent(pid) == launcher.pid]
        os.kill(victim, signal.SIGKILL)
        assert launcher.wait(timeout=15) == 1
    last = (tmp_path / "stderr").read_text().splitlines()[-1]
    assert last.startswith("error: rank 1 was ended by SIGKILL")
    assert last.endswith("; the other ranks were stopped")
    assert 6 <= _num_rows(folder) < STEPS
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    expected, found = metrics_of(learned), metrics_of(folder)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert rewards(found) == rewards(expected)
    weights = f"checkpoints/step_{STEPS}/hf/model.safetensors"
    assert (folder / weights).read_bytes() == (learned / weights).read_bytes()
    assert not marked(str(tmp_path))


def test_f06_trap_25_engines_of_ranks_that_only_sample_are_killed_and_the_run_goes_on_to_the_same_end(
    config_of, shell, start, metrics_of, tmp_path
):
    """One rank trains, one samples with vLLM in a process of its own, a step ahead."""
    apart = {"engine": VLLM | {"process": {}}, "placement": "split", "max_staleness": 1}
    undisturbed = config_of("apart", rollout=apart, total_steps=4)
    done = shell("shardwise", "rl", "--nproc", "2", "-c", str(undisturbed), timeout=400)
    assert done.code == 0, done.err
    killed = config_of("apart-killed", rollout=apart, total_steps=4)
    output = f"trainer.output_dir={killed.with_suffix('')}"
    faults = "rank=1 phase=serve nth=3 action=kill"
    run = start("rl", "--nproc", "2", "-c", str(killed), output, faults=faults)
    assert run.end(seconds=400) == 0, run.err
    assert "warning: the rollout engine of rank 1 ended its process by SIGKILL" in run.err
    expected, found = metrics_of(undisturbed.with_suffix("")), metrics_of(run.run)
    assert rewards(found) == rewards(expected)
    weights = "checkpoints/step_4/hf/model.safetensors"
    assert (run.run / weights).read_bytes() == (undisturbed.with_suffix("") / weights).read_bytes()


def _num_rows(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def _rank(pid: int) -> str | None:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(variable.partition("=")[::2] for variable in variables).get("RANK")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def with_wide_heads(model: Path) -> None:
    """The model of examples/vl_digits, random once more, with heads that vLLM's CPU kernels know."""
    config = Qwen3VLConfig.from_pretrained(model)
    text = config.text_config
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 2, 1, 32
    text.rope_parameters |= {"mrope_section": [8, 4, 4]}
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(model)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_a_policy_that_sees_images_is_sampled_as_it_is_trained(shell, tmp_path, metrics_of):
    """Rows of one to three pictures, on two ranks, while every weight changes: those of the vision tower too."""
    prepare = [sys.executable, "examples/vl_digits/prepare.py", str(tmp_path), "64"]
    subprocess.run(prepare, cwd=ROOT, check=True, capture_output=True)
    with_wide_heads(tmp_path / "model")
    (tmp_path / "rules.py").write_text(REWARD)
    done = shell(
        *["shardwise", "rl", "--nproc", "2", "-c", "examples/vl_digits_grpo.yaml", f"model.path={tmp_path / 'model'}"],
        *[f"data.train_files={tmp_path / 'train.jsonl'}", "data.validation_files=[]", "rollout.num_prompts=8"],
        *["rollout.engine.type=vllm", "rollout.engine.args.enforce_eager=true", "trainer.tensorboard=false"],
        *["rollout.engine.args.kv_cache_memory_bytes=33554432", "rollout.engine.args.limit_mm_per_prompt.video=0"],
        *[f"reward.functions={tmp_path / 'rules.py'}:compute_score", f"trainer.output_dir={tmp_path / 'run'}"],
        *["trainer.total_steps=4", "trainer.learning_rate=3e-3", "trainer.warmup_steps=0"],
        "rollout.probe_every_syncs=1",
        timeout=400,
    )
    assert done.code == 0, done.err
    rows = metrics_of(tmp_path / "run")
    assert len(rows) == 4
    assert all(row["rollout/logprob_abs_diff_max"] < 5e-5 for row in rows)
    assert all(row["sync/probe_max_difference"] < 5e-5 for row in rows if "sync/probe_max_difference" in row)
    assert any("sync/probe_max_difference" in row for row in rows)
    trained, first = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "run" / "checkpoints" / "step_4" / "hf", tmp_path / "model")
    )
    moved = {name for name, tensor in trained.items() if not torch.equal(tensor, first[name])}
    assert any("visual" in name for name in moved)
