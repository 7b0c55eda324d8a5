"""The command from end to end; the files of other trainers are tested with engine/files/foreign."""

import json
import math
import shutil

import pytest
import torch
import torch.distributed.checkpoint
import yaml
from foreign_checkpoints import NUM_UPDATES, Touch, write_dcp, write_verl
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from shardwise.cli import main

VOCABULARY = {"vocab_size": 261}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SHARDWISE_JOB_FOLDER", "SHARDWISE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


def write_config(folder, family, model_folder):
    """config.json and tokenizer, without weights."""
    config = tiny_model(family, **VOCABULARY).config
    config.architectures = [type(tiny_model(family)).__name__]
    config.dtype = torch.bfloat16
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def verl(run_ranks, model_folder, tmp_path_factory):
    """(global_step_40, the model's tensors, AdamW's states)."""
    folder = tmp_path_factory.mktemp("verl") / "global_step_40"
    found = run_ranks(write_verl, 2, str(folder / "actor"), "qwen3", {"fsdp": 2}, True, VOCABULARY)[0]
    (folder / "actor" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    write_config(folder / "actor" / "huggingface", "qwen3", model_folder)
    return folder, *({name: torch.from_numpy(array) for name, array in tree.items()} for tree in found)


@pytest.fixture(scope="module")
def dcp(run_ranks, tmp_path_factory):
    """(folder, the model's tensors, AdamW's states)."""
    folder = tmp_path_factory.mktemp("dcp") / "save"
    found = run_ranks(write_dcp, 2, str(folder), "llama", ("model", "optim"), VOCABULARY)[0]
    return folder, *({name: torch.from_numpy(array) for name, array in tree.items()} for tree in found)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40)[None]).logits


def source_model(family, tensors):
    model = tiny_model(family, **VOCABULARY)
    model.load_state_dict(tensors)
    return model


def test_verls_model_is_imported_bitwise_and_the_report_says_what_is_where(verl, tmp_path, capsys):
    folder, tensors, _ = verl
    out = tmp_path / "out"
    assert main(["import-checkpoint", str(folder), str(out), "--dtype", "float32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    assert torch.equal(logits(model), logits(source_model("qwen3", tensors)))
    written = load_file(out / "model.safetensors")
    assert written.keys() == tensors.keys() - {"lm_head.weight"}
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
    assert capsys.readouterr().out.splitlines() == [
        f"import-checkpoint: verl (FSDP2), 2 ranks, mesh fsdp 2: {folder / 'actor'}",
        f"import-checkpoint: 25 tensors, float32, {size:,.1f} MiB",
        "import-checkpoint: left out: the optimizer (--config takes it over), extra_state files (schedule, random "
        "generators)",
        f"{out}: float32, {(out / 'model.safetensors').stat().st_size / 2**20:,.1f} MiB in 1 file",
        f"import-checkpoint: try it with `shardwise generate {out}`",
    ]
    assert main(["generate", str(out), "--prompt", "2+3=", "--max-tokens", "3"]) == 0


def test_a_dcp_folder_is_imported_in_the_configs_dtype_by_default(dcp, model_folder, tmp_path, capsys):
    folder, tensors, _ = dcp
    config, out = write_config(tmp_path / "config", "llama", model_folder), tmp_path / "out"
    options = ["--model", str(config), "--max-shard-size", "0.02MB"]
    assert main(["import-checkpoint", str(folder), str(out), *options]) == 0
    assert len(list(out.glob("*.safetensors"))) > 2
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.state_dict().keys() == tensors.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name].bfloat16()), name
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"import-checkpoint: torch.distributed.checkpoint, 2 files: {folder}"
    assert lines[1].startswith("import-checkpoint: 21 tensors under app.model., float32, ")
    num_states = lines[2].removeprefix("import-checkpoint: left out: app.optim (").removesuffix("), num_tokens (1)")
    assert int(num_states) > 3 * 21


def base_folder(folder, family, tensors, model_folder):
    """What a run's model.path names."""
    write_config(folder, family, model_folder)
    source_model(family, tensors).save_pretrained(folder)
    return folder


def sft_config(path, source, run, data, **engine):
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": {"path": str(source)},
        "data": {"train_files": [str(data)], "max_sequence_tokens": 32, "apply_chat_template": False},
        "engine": {"max_tokens_per_micro_batch": 64, **engine},
        "trainer": {"total_steps": 42, "batch_size": 4, "output_dir": str(run), "tensorboard": False},
    }
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("kind", ["verl", "dcp"])
def test_a_run_goes_on_from_the_imported_optimizer(kind, request, model_folder, tmp_path, capsys):
    """The state is that of the source, bitwise; a DCP folder that names no step is at AdamW's number of updates."""
    folder, tensors, states = request.getfixturevalue(kind)
    family, step = {"verl": ("qwen3", 40), "dcp": ("llama", NUM_UPDATES)}[kind]
    out, base = tmp_path / "imported", base_folder(tmp_path / "base", family, tensors, model_folder)
    config = sft_config(tmp_path / "run.yaml", base, tmp_path / "run", tmp_path / "train.jsonl")
    options = ["--config", str(config), "--recipe", "sft", "--model", str(base)]
    assert main(["import-checkpoint", str(folder), str(out), *options]) == 0
    checkpoint = out / "checkpoints" / f"step_{step}"
    stored = load_file(checkpoint / "state" / "policy" / "rank_0.safetensors")
    masters = {
        f"master/{name}": tensor for name, tensor in tensors.items() if family == "llama" or name != "lm_head.weight"
    }
    assert stored.keys() == (states | masters).keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in (states | masters).items())
    printed = capsys.readouterr().out
    assert f"AdamW after {NUM_UPDATES} updates; continue with trainer.resume={checkpoint}\n" in printed
    assert "left out: extra_state files" in printed or "left out: app.optim (" in printed
    total = f"trainer.total_steps={step + 2}"
    assert main(["sft", "-c", str(config), f"trainer.resume={out}", total, "trainer.resume_allow=[trainer]"]) == 0
    went_on = capsys.readouterr()
    assert f"sft: resumes from {checkpoint}" in went_on.out
    assert "was not looked through for NaN and infinities" not in went_on.err
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [step + 1, step + 2]
    state = load_file(tmp_path / "run" / "checkpoints" / f"step_{step + 2}" / "state" / "policy" / "rank_0.safetensors")
    assert state["step/model.norm.weight"].item() == NUM_UPDATES + 2
    assert not torch.equal(state["master/model.norm.weight"], stored["master/model.norm.weight"])


def refusal(arguments, capsys):
    """The one line that explains it."""
    assert main(["import-checkpoint", *map(str, arguments)]) == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("error: ")


def test_what_cannot_be_imported_is_refused_before_anything_is_written(verl, dcp, model_folder, tmp_path, capsys):
    folder, out = dcp[0], tmp_path / "out"
    assert refusal([tmp_path / "none", out], capsys).startswith(f"{tmp_path / 'none'} is no folder; give a folder ")
    (tmp_path / "nothing").mkdir()
    assert refusal([tmp_path / "nothing", out], capsys).startswith(
        f"{tmp_path / 'nothing'} holds no checkpoint of another trainer; give a folder with the .metadata file of "
    )
    assert refusal([folder, out], capsys).endswith(
        "huggingface/config.json does not exist; name a folder with the model's config.json and tokenizer as --model "
        "(it needs no weights)"
    )
    other = write_config(tmp_path / "other", "qwen3", model_folder)
    assert "save does not fit its config.json (Qwen3ForCausalLM): " in refusal([folder, out, "--model", other], capsys)
    (other / "config.json").write_text('{"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}')
    (other / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "other/config.json is not a model config: " in refusal([folder, out, "--model", other], capsys)
    assert not (tmp_path / "ran").exists()
    (out / "mine").mkdir(parents=True)
    assert refusal([verl[0], out], capsys) == f"{out} is not an empty folder; name a new one, or remove what is there"
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_a_prefix_may_lack_its_last_dot(dcp, model_folder, tmp_path, capsys):
    config = write_config(tmp_path / "config", "llama", model_folder)
    options = ["--model", str(config), "--prefix", "app.model"]
    assert main(["import-checkpoint", str(dcp[0]), str(tmp_path / "out"), *options]) == 0
    assert "import-checkpoint: 21 tensors under app.model., float32, " in capsys.readouterr().out


def changed_dcp(folder, tensors, states, **values):
    """One rank's folder of these in which the first number of some tensors is another one."""
    named = {f"app.model.{name}": tensor for name, tensor in tensors.items()}
    named |= {"app.optim.state.{1}.{0}".format(*name.split("/")): state for name, state in states.items()}
    named = {name: tensor.clone() for name, tensor in named.items()}
    for name, value in values.items():
        if math.isfinite(value) and value > torch.finfo(torch.float32).max:
            named[name] = named[name].double()
        named[name].view(-1)[0] = value
    torch.distributed.checkpoint.save(named, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("value", "dtype", "remedy"),
    [
        (1e6, "float16", "(which ends at 65,504), or no numbers in the source; use --dtype bfloat16 or float32"),
        (math.nan, "bfloat16", "(which ends at 3.38953e+38), or no numbers in the source; take an earlier checkpoint"),
        (1e39, "float32", "(which ends at 3.40282e+38), or no numbers in the source; take an earlier checkpoint"),
    ],
)
def test_weights_that_the_dtype_does_not_hold_are_refused(dcp, model_folder, tmp_path, capsys, value, dtype, remedy):
    source = changed_dcp(tmp_path / "source", *dcp[1:], **{"app.model.model.norm.weight": value})
    config, out = write_config(tmp_path / "config", "llama", model_folder), tmp_path / "out"
    assert refusal([source, out, "--model", config, "--dtype", dtype], capsys) == (
        f"model.norm.weight holds NaN or infinities as {dtype}: its values are too large for that dtype {remedy}"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "source"]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    ("stored", "value", "named"),
    [
        ("app.model.model.norm.weight", math.nan, "model.norm.weight holds NaN or infinities as bfloat16: "),
        ("app.optim.state.model.norm.weight.exp_avg_sq", math.inf, "exp_avg_sq/model.norm.weight holds NaN or inf"),
        ("app.optim.state.model.norm.weight.exp_avg", 1e39, "exp_avg/model.norm.weight holds NaN or infinities as f"),
        ("app.optim.state.model.norm.weight.step", math.nan, "step/model.norm.weight holds NaN or infinities as flo"),
    ],
)
def test_a_training_state_that_is_not_finite_is_refused_and_leaves_nothing(
    dcp, model_folder, tmp_path, capsys, stored, value, named, is_there
):
    source = changed_dcp(tmp_path / "source", *dcp[1:], **{stored: value})
    base, out = base_folder(tmp_path / "base", "llama", dcp[1], model_folder), tmp_path / "out"
    config = sft_config(tmp_path / "run.yaml", base, tmp_path / "run", tmp_path / "train.jsonl")
    if is_there:
        out.mkdir()
    options = ["--config", config, "--recipe", "sft", "--model", base, "--dtype", "bfloat16"]
    assert refusal([source, out, *options], capsys).startswith(named)
    assert out.exists() == is_there
    assert not is_there or not list(out.iterdir())


def test_what_is_not_read_may_be_cut(dcp, model_folder, tmp_path, capsys):
    """The optimizer's part, which only --config reads."""
    source = changed_dcp(tmp_path / "source", *dcp[1:])
    (file,) = source.glob("*.distcp")
    places = torch.distributed.checkpoint.FileSystemReader(source).read_metadata().storage_data
    last = max(places, key=lambda index: places[index].offset)
    assert last.fqn.startswith("app.optim.")
    file.write_bytes(file.read_bytes()[: places[last].offset + 10])
    base, out = base_folder(tmp_path / "base", "llama", dcp[1], model_folder), tmp_path / "out"
    config = sft_config(tmp_path / "run.yaml", base, tmp_path / "run", tmp_path / "train.jsonl")
    options = ["--config", config, "--recipe", "sft", "--model", base]
    assert refusal([source, out, *options], capsys).startswith(f"{file} is cut: it has ")
    assert not out.exists()
    assert main(["import-checkpoint", str(source), str(out), "--model", str(base)]) == 0


def test_a_run_of_another_model_is_refused(verl, dcp, model_folder, tmp_path, capsys):
    llama = base_folder(tmp_path / "llama", "llama", dcp[1], model_folder)
    config = sft_config(tmp_path / "run.yaml", llama, tmp_path / "run", tmp_path / "train.jsonl")
    own, out = verl[0] / "actor" / "huggingface", tmp_path / "out"
    arguments = [verl[0], out, "--config", config, "--recipe", "sft"]
    message = refusal(arguments, capsys)
    assert message.startswith(
        f"model.path={llama} of --config and {own} (the checkpoint's) are different models: measured by the first, the "
        "second has 1 missing: lm_head.weight; 4 not part of the model: model.layers.0.self_attn.k_norm.weight, "
    )
    assert "model.norm.weight is [32], expected [30]" in message or "is [261, 32], expected [261, 30]" in message
    assert message.endswith("; set model.path to the model that was trained, or --model to its folder")
    assert f"and {own} (--model) are" in refusal([*arguments, "--model", own], capsys)
    shutil.rmtree(llama)
    assert refusal(arguments, capsys) == (
        f"model.path of --config: {llama} is not a folder; give a Hugging Face model folder or a hub name"
    )
    assert not out.exists()


def test_an_attack_is_refused_and_leaves_nothing(verl, tmp_path, capsys):
    source, ran = shutil.copytree(verl[0], tmp_path / "source"), tmp_path / "ran"
    file = source / "actor" / "model_world_size_2_rank_1.pt"
    torch.save({"model.norm.weight": Touch(ran)}, file)
    assert refusal([source, tmp_path / "out"], capsys) == (
        f"{file} is refused: loading it would call posix.system, which no tensor needs and which may run code of "
        "whoever wrote it; nothing was called. Get it from where it was trained, saved as safetensors"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_adapters_are_refused(model_folder, tmp_path, capsys):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    torch.save({name: torch.ones(2, 2)}, tmp_path / "model_world_size_1_rank_0.pt")
    write_config(tmp_path / "huggingface", "qwen3", model_folder)
    assert f"holds LoRA adapters ({name}), which are not imported" in refusal([tmp_path, tmp_path / "out"], capsys)


def test_verls_files_hold_nothing_but_the_model(verl, tmp_path, capsys):
    source = shutil.copytree(verl[0], tmp_path / "source")
    for rank in (0, 1):
        file = source / "actor" / f"model_world_size_2_rank_{rank}.pt"
        state = torch.load(file, weights_only=False)
        torch.save(state | {"unknown": torch.ones(2)}, file)
    message = refusal([source, tmp_path / "out"], capsys)
    assert "(Qwen3ForCausalLM): 1 tensor is not part of the model (unknown). Take the config.json " in message
    message = refusal([source, tmp_path / "out", "--prefix", "x."], capsys)
    assert message == "--prefix=x. has no effect on verl's files, which hold nothing but the model; remove it"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["trainer.optimizer=muon"], "trainer.optimizer=muon"),
        (["engine.param_dtype=bfloat16", "engine.master_dtype=bfloat16"], "engine.master_dtype=bfloat16"),
        (["engine.lora={}"], "engine.lora"),
    ],
)
def test_a_run_that_cannot_go_on_from_adamw_is_refused(verl, tmp_path, capsys, options, message):
    config = sft_config(tmp_path / "run.yaml", "m", tmp_path / "run", tmp_path / "train.jsonl")
    tree = yaml.safe_load(config.read_text())
    for option in options:
        key, value = option.split("=")
        group, name = key.split(".")
        tree[group][name] = yaml.safe_load(value)
    config.write_text(yaml.safe_dump(tree))
    arguments = [verl[0], tmp_path / "out", "--config", config, "--recipe", "sft"]
    assert refusal(arguments, capsys).startswith(
        f"--config has {message}; an imported training state is AdamW's of one"
    )
    assert not (tmp_path / "out").exists()


def test_config_and_recipe_go_together(verl, tmp_path, capsys):
    assert refusal([verl[0], tmp_path / "out", "--recipe", "sft"], capsys).startswith(
        "--config and --recipe go together"
    )


def test_a_checkpoint_without_the_optimizers_states_has_none_to_go_on_from(verl, model_folder, tmp_path, capsys):
    source = shutil.copytree(verl[0], tmp_path / "source")
    (source / "actor" / "optim_world_size_2_rank_1.pt").unlink()
    base = base_folder(tmp_path / "base", "qwen3", verl[1], model_folder)
    config = sft_config(tmp_path / "run.yaml", base, tmp_path / "run", tmp_path / "train.jsonl")
    arguments = [source, tmp_path / "out", "--config", config, "--recipe", "sft"]
    assert "lacks optim_world_size_2_rank_1.pt; every rank writes a file" in refusal(arguments, capsys)
    (source / "actor" / "optim_world_size_2_rank_0.pt").unlink()
    assert "holds no optim_world_size_W_rank_R.pt files" in refusal(arguments, capsys)
    assert not (tmp_path / "out").exists()
