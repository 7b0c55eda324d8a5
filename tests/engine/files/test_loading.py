import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from family_table import FAMILIES as FAMILY_TABLE
from family_table import save_model
from ranks import RankError
from safetensors.torch import load_file, save_file
from safetensors.torch import save_model as save_shared_once
from tiny_models import FAMILIES, MOE_FAMILIES, empty_model, families, tiny_folder, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from shardwise.config import EngineConfig, ModelError, OptimizerConfig
from shardwise.engine import TrainEngine
from shardwise.engine.files import loading
from shardwise.engine.files.loading import load_weights
from shardwise.engine.files.model_folder import SINGLE_NAME
from shardwise.engine.weights import stream_weights


@pytest.fixture(scope="module", params=families("llama", "qwen3_moe", "mixtral", of=FAMILIES + MOE_FAMILIES))
def folder(request, tmp_path_factory):
    return tiny_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def qwen(tmp_path):
    """A folder of its own for every test that breaks one."""
    return tiny_folder("qwen3", tmp_path / "qwen")


@pytest.fixture
def mixture(tmp_path):
    return tiny_folder("qwen3_moe", tmp_path / "mixture")


@pytest.fixture
def pythia(tmp_path):
    """Its output projection is lm_head in the model and embed_out in the files."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=101, **sizes))
    model.save_pretrained(tmp_path)
    assert "embed_out.weight" in load_file(tmp_path / SINGLE_NAME)
    return model


def load_whole(folder):
    """Loads without a process group: weights of a whole model, and the bytes read."""
    model = empty_model(folder)
    return model, load_weights(model, folder)


def assert_same_parameters(found, expected):
    for name, parameter in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter.float()), name


def load_sharded(folder, mesh_shape, dim):
    names = ("replicate", "shard")[-len(mesh_shape) :]
    model = empty_model(Path(folder), dim=dim, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    num_bytes = load_weights(model, Path(folder))
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return num_bytes, held, {name: tensor.clone() for name, tensor in stream_weights(model, torch.float32)}


@pytest.mark.parametrize(("mesh_shape", "copies"), [((1,), 1), ((2,), 1), ((4,), 1), ((2, 2), 2)])
def test_trap_12_every_rank_reads_the_bytes_it_holds_and_no_other(run_ranks, folder, mesh_shape, copies):
    """Of fused experts too: a rank reads the files' matrices of its own experts. The tied projection is read once."""
    whole, file_bytes = load_whole(folder)
    assert file_bytes == sum(tensor.nbytes for tensor in load_file(folder / SINGLE_NAME).values())
    world_size = torch.Size(mesh_shape).numel()
    results = run_ranks(load_sharded, world_size, str(folder), mesh_shape, 0)
    assert sum(num_bytes for num_bytes, _, _ in results) == copies * file_bytes
    for num_bytes, held, weights in results:
        assert num_bytes == held
        assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("dim", [1, 2])
def test_parameters_sharded_along_another_dimension_are_loaded_the_same(run_ranks, folder, dim):
    """Fused experts are then read whole, and sliced; the rest is read by columns."""
    whole, file_bytes = load_whole(folder)
    fused = sum(parameter.nbytes for parameter in whole.parameters() if parameter.dim() == 3)
    results = run_ranks(load_sharded, 2, str(folder), (2,), dim)
    assert sum(num_bytes for num_bytes, _, _ in results) == file_bytes + fused
    for _, _, weights in results:
        assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("family", FAMILIES + MOE_FAMILIES)
def test_whole_models_are_those_of_transformers(tmp_path, family):
    model = tiny_model(family)
    for limit in ("1GB", "8KB"):
        model.save_pretrained(tmp_path / limit, max_shard_size=limit)
        loaded, num_bytes = load_whole(tmp_path / limit)
        assert num_bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert_same_parameters(loaded, model)
    assert len(list((tmp_path / "8KB").glob("*.safetensors"))) > 2


def test_experts_that_are_stored_fused_are_read_by_rows_too(run_ranks, tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / SINGLE_NAME)
    for num_bytes, held, weights in run_ranks(load_sharded, 4, str(tmp_path), (4,), 0):
        assert num_bytes == held
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights.items())


def test_renamed_weights_load_under_the_names_of_the_model(pythia, tmp_path):
    loaded, num_bytes = load_whole(tmp_path)
    assert num_bytes == sum(parameter.nbytes for parameter in pythia.parameters())
    assert_same_parameters(loaded, pythia)


def test_a_weight_stored_under_both_names_is_refused(pythia, tmp_path):
    tensors = load_file(tmp_path / SINGLE_NAME)
    save_file(tensors | {"lm_head.weight": tensors["embed_out.weight"] + 1}, tmp_path / SINGLE_NAME)
    with pytest.raises(ModelError, match=r"1 tensor is not part of the model \(embed_out\.weight\)\. Take"):
        load_whole(tmp_path)


def test_half_precision_checkpoints_are_cast_to_the_masters(tmp_path):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = tiny_model("qwen3_moe").to(dtype)
        model.save_pretrained(tmp_path)
        loaded, num_bytes = load_whole(tmp_path)
        assert num_bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert_same_parameters(loaded, model)


def test_numbers_beyond_float16_are_refused_for_weights_in_it(tmp_path):
    """A frozen model that computes in float16 would hold infinities, and give NaN for every token."""
    model = tiny_model("qwen3")
    name = "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = 1e5
    model.save_pretrained(tmp_path)
    half = empty_model(tmp_path).half()
    with pytest.raises(ModelError, match=rf"{name} holds numbers beyond 65,504, .*set param_dtype to bfloat16"):
        load_weights(half, tmp_path)
    load_weights(half, tmp_path, require_finite=False)
    assert half.get_parameter(name)[0, 0].isinf()
    load_weights(empty_model(tmp_path).bfloat16(), tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "model.layers.1.mlp.down_proj.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.5.up_proj.weight"),
    ],
)
def test_f34_a_weight_that_is_not_finite_is_refused_with_its_name(run_ranks, tmp_path, family, name, value):
    """In its last row, which the second of two ranks reads."""
    folder = tiny_folder(family, tmp_path)
    tensors = load_file(folder / SINGLE_NAME)
    tensors[name][-1, 0] = value
    save_file(tensors, folder / SINGLE_NAME)
    expected = f"{folder / SINGLE_NAME}: {name} holds NaN or infinities"
    with pytest.raises(ModelError, match=expected):
        load_whole(folder)
    with pytest.raises(RankError) as error:
        run_ranks(load_sharded, 2, str(folder), (2,), 0)
    assert str(error.value).count(f"ModelError: rank 1: {expected}") == 2


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_checkpoint_of_a_bare_backbone_loads(tmp_path, family):
    model = tiny_model(family, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    model.base_model.save_pretrained(tmp_path / "bare")
    shutil.copy(tmp_path / "config.json", tmp_path / "bare" / "config.json")
    assert "embed_tokens.weight" in load_file(tmp_path / "bare" / SINGLE_NAME)
    loaded, _ = load_whole(tmp_path / "bare")
    assert_same_parameters(loaded, model)


def test_an_equal_tied_copy_and_rotary_frequencies_in_a_checkpoint_are_no_hindrance(qwen):
    tensors = load_file(qwen / SINGLE_NAME)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(
        tensors | {"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        qwen / SINGLE_NAME,
    )
    model, num_bytes = load_whole(qwen)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, embedding)
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values()) + embedding.nbytes, "it was compared"


def test_of_tied_weights_a_folder_may_hold_the_copy_alone(qwen):
    """As safetensors' save_model leaves them."""
    expected = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    save_shared_once(expected, str(qwen / SINGLE_NAME), metadata={"format": "pt"})
    stored = load_file(qwen / SINGLE_NAME)
    assert "lm_head.weight" in stored
    assert "model.embed_tokens.weight" not in stored
    model, num_bytes = load_whole(qwen)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert num_bytes == sum(tensor.nbytes for tensor in stored.values())
    save_file(stored | {"lm_head.weight": stored["lm_head.weight"][:-1].clone()}, qwen / SINGLE_NAME)
    with pytest.raises(ModelError, match=r"of the wrong shape \(lm_head\.weight is \["):
        load_whole(qwen)


def load_on_a_rank(folder):
    with pytest.raises(ModelError) as error:
        TrainEngine.build(Path(folder), EngineConfig(), device=torch.device("cpu"), optimizer=OptimizerConfig())
    return str(error.value)


def test_a_tied_copy_that_differs_is_refused_on_every_rank(run_ranks, qwen):
    """As adapters leave it that trained the projection and were merged: transformers would compute with both."""
    tensors = load_file(qwen / SINGLE_NAME)
    other = tensors["model.embed_tokens.weight"].clone()
    other[-1, -1] += 1  # among the rows of the last rank
    save_file(tensors | {"lm_head.weight": other}, qwen / SINGLE_NAME)
    first, second = run_ranks(load_on_a_rank, 2, str(qwen))
    assert first == second
    assert f"{qwen} holds a lm_head.weight that differs from model.embed_tokens.weight, and its config.json" in first
    assert "(tie_word_embeddings=true); set that to false there to keep both" in first
    save_file(tensors | {"lm_head.weight": other[:-1].clone()}, qwen / SINGLE_NAME)
    with pytest.raises(ModelError, match=r"of the wrong shape \(lm_head\.weight is \["):
        load_whole(qwen)


def test_what_a_family_declares_as_left_over_is_ignored(mixture):
    """DeepSeek-V3's hub files hold a layer that predicts further tokens."""
    tensors = load_file(mixture / SINGLE_NAME)
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(3)}, mixture / SINGLE_NAME)
    with pytest.raises(ModelError, match=r"not part of the model \(model\.layers\.2\.eh_proj\.weight\)\. Take"):
        load_whole(mixture)
    model = empty_model(mixture)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]
    load_weights(model, mixture)
    assert_same_parameters(model, tiny_model("qwen3_moe"))


def test_missing_extra_and_misshapen_tensors_are_listed_together(qwen):
    tensors = load_file(qwen / SINGLE_NAME)
    for layer in (0, 1):
        for part in ("q_proj", "k_proj"):
            del tensors[f"model.layers.{layer}.self_attn.{part}.weight"]
    tensors["model.norm.weight"] = torch.ones(33)
    tensors["value_head.weight"] = torch.ones(1)
    save_file(tensors, qwen / SINGLE_NAME)
    with pytest.raises(ModelError) as error:
        load_whole(qwen)
    assert str(error.value) == (
        f"{qwen} does not fit its config.json (Qwen3ForCausalLM): "
        "4 tensors are missing (model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.q_proj.weight, "
        "model.layers.1.self_attn.k_proj.weight and 1 more); "
        "1 tensor is of the wrong shape (model.norm.weight is [33], expected [32]); "
        "1 tensor is not part of the model (value_head.weight). Take the config.json that was saved with these weights"
    )


def test_experts_that_do_not_fit_are_named_as_in_the_files(mixture):
    tensors = load_file(mixture / SINGLE_NAME)
    experts = "model.layers.1.mlp.experts"
    del tensors[f"{experts}.3.up_proj.weight"]
    tensors[f"{experts}.2.gate_proj.weight"] = torch.ones(12, 17)
    tensors[f"{experts}.6.down_proj.weight"] = torch.ones(16, 12)
    tensors = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp.experts.5." not in name}
    save_file(tensors, mixture / SINGLE_NAME)
    with pytest.raises(ModelError) as error:
        load_whole(mixture)
    assert str(error.value) == (
        f"{mixture} does not fit its config.json (Qwen3MoeForCausalLM): "
        "4 tensors are missing (model.layers.0.mlp.experts.5.down_proj.weight, "
        "model.layers.0.mlp.experts.5.gate_proj.weight, model.layers.0.mlp.experts.5.up_proj.weight and 1 more); "
        f"1 tensor is of the wrong shape ({experts}.2.gate_proj.weight is [12, 17], expected [12, 16]); "
        f"1 tensor is not part of the model ({experts}.6.down_proj.weight). Take the config.json that was saved with "
        "these weights"
    )


def test_a_layer_whose_experts_are_all_missing_names_them_as_the_hub_does(mixture):
    tensors = load_file(mixture / SINGLE_NAME)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("up_proj.weight")}
    save_file(kept, mixture / SINGLE_NAME)
    with pytest.raises(
        ModelError, match=r"12 tensors are missing \(model\.layers\.0\.mlp\.experts\.0\.up_proj\.weight"
    ):
        load_whole(mixture)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused(mixture, name, dtype):
    tensors = load_file(mixture / SINGLE_NAME)
    save_file(tensors | {name: tensors[name].to(dtype)}, mixture / SINGLE_NAME)
    with pytest.raises(ModelError) as error:
        load_whole(mixture)
    shown = str(dtype).removeprefix("torch.")
    assert str(error.value).endswith(
        f"1 tensor is not stored as float64, float32, bfloat16, float16 ({name} is {shown}). Take a checkpoint that is "
        "not quantised"
    )


def load_own_copy(folders):
    """Every rank loads from a folder of its own. Returns the error's text, and that a collective afterwards works."""
    folder = Path(folders[dist.get_rank()])
    model = empty_model(folder, dim=0)
    try:
        load_weights(model, folder)
        text = "loaded"
    except ModelError as error:
        text = str(error)
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, text)
    return answers


def test_a_file_that_one_rank_cannot_read_fails_on_every_rank_and_names_both(run_ranks, mixture):
    """Hosts have copies of their own; one of them is cut."""
    copy = shutil.copytree(mixture, mixture.parent / "copy")
    data = (copy / SINGLE_NAME).read_bytes()
    (copy / SINGLE_NAME).write_bytes(data[:-100])
    expected = (
        f"rank 1: {copy / SINGLE_NAME} cannot be read as a safetensors file: its tensors end at byte {len(data)}, "
        f"and the file at {len(data) - 100}; download or copy it again"
    )
    assert run_ranks(load_own_copy, 2, [str(mixture), str(copy)]) == [[expected] * 2] * 2


def load_file_that_is_cut_while_it_is_read(folder):
    """The last rank's rows of the last tensor are cut off after the headers were checked."""
    model = empty_model(Path(folder), dim=0)
    checked = loading.checked_blocks

    def check_then_cut(*arguments):
        blocks = checked(*arguments)
        dist.barrier()
        if dist.get_rank() == 0:
            file = Path(folder) / SINGLE_NAME
            with file.open("r+b") as handle:
                handle.truncate(file.stat().st_size - 16)
        dist.barrier()
        return blocks

    loading.checked_blocks = check_then_cut
    try:
        load_weights(model, Path(folder))
        return "loaded"
    except ModelError as error:
        return str(error)
    finally:
        loading.checked_blocks = checked


def test_a_slice_that_one_rank_cannot_read_fails_on_every_rank(run_ranks, tmp_path):
    """Rank 0's slices are intact."""
    tiny_folder("llama", tmp_path)
    first, second = run_ranks(load_file_that_is_cut_while_it_is_read, 2, str(tmp_path))
    assert first == second
    assert first.startswith(
        f"rank 1: {tmp_path / SINGLE_NAME}: model.norm.weight cannot be read: the file ends at byte"
    )
    assert first.endswith("; download or copy it again")


def test_a_critic_starts_from_a_language_model_whose_projection_has_another_name_in_the_files(run_ranks, tmp_path):
    """LLaVA's is language_model.lm_head there."""
    model = save_model("llava", FAMILY_TABLE["llava"], tmp_path)
    assert "language_model.lm_head.weight" in load_file(tmp_path / SINGLE_NAME)
    (found,) = run_ranks(weights_of_a_critic, 1, str(tmp_path))
    own = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert found.keys() - own.keys() == {"score.weight", "score.bias"}
    assert all(torch.equal(tensor, found[name]) for name, tensor in own.items())


def weights_of_a_critic(folder):
    engine = TrainEngine.build(
        Path(folder), EngineConfig(), device=torch.device("cpu"), optimizer=OptimizerConfig(), head="token_values"
    )
    return {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}


def weights_of_an_engine(folder):
    engine = TrainEngine.build(
        Path(folder), EngineConfig(), device=torch.device("cpu"), optimizer=OptimizerConfig(), head="logprobs"
    )
    return {name: tensor.clone() for name, tensor in engine.named_weights(torch.float32)}


def test_experts_are_read_as_the_hub_lays_them_out_and_as_transformers_writes_them(run_ranks, tmp_path):
    """Those of Qwen3-VL-MoE on the hub are [E, input, output]; any other shape is refused."""
    options = FAMILY_TABLE["qwen3_vl_moe"]
    text = options["text_config"] | {"moe_intermediate_size": 24}
    model = save_model("qwen3_vl_moe", options | {"text_config": text}, tmp_path)
    expected = {name: tensor for name, tensor in model.state_dict().items() if ".experts." in name}
    stored = load_file(tmp_path / SINGLE_NAME)
    for dims in [(0, 1, 2), (0, 2, 1)]:
        turned = {name: stored[name].permute(dims).contiguous() for name in expected}
        save_file(stored | turned, tmp_path / SINGLE_NAME, metadata={"format": "pt"})
        for weights in run_ranks(weights_of_an_engine, 2, str(tmp_path)):
            assert {name for name in expected if torch.equal(weights[name], expected[name])} == expected.keys()
    turned = {name: stored[name].permute(1, 2, 0).contiguous() for name in expected}
    save_file(stored | turned, tmp_path / SINGLE_NAME, metadata={"format": "pt"})
    with pytest.raises(
        RankError, match=r"of the wrong shape \(\S+layers\.0\.mlp\.experts\.down_proj is \[32, 24, 4\], exp"
    ):
        run_ranks(weights_of_an_engine, 2, str(tmp_path))
