"""The embedded engine against transformers' own generate and forward."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, families, tiny_folder
from transformers import AutoModelForCausalLM, GenerationConfig

from shardwise.config import ConfigError, ModelError, TrainingError
from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest

CPU = torch.device("cpu")


def open_engine(folder: Path, *, max_rows: int = 8, **options) -> EmbeddedEngine:
    return EmbeddedEngine.from_folder(folder, dtype=torch.float32, max_rows=max_rows, device=CPU, **options)


def prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(4, 48, (length,), generator=generator).tolist() for length in lengths]


def requests(prompt_ids: list[list[int]], **options) -> list[GenerateRequest]:
    settings = {"max_tokens": 12, "temperature": 0.0, **options}
    return [GenerateRequest(uid=f"row {i}", prompt_ids=ids, **settings) for i, ids in enumerate(prompt_ids)]


def generated_by_transformers(model, prompt_ids: list[int], max_tokens: int) -> list[int]:
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=3, pad_token_id=0)
    output = model.generate(torch.tensor([prompt_ids]), generation_config=config)
    return output[0, len(prompt_ids) :].tolist()


@torch.no_grad()
def logprobs_by_transformers(model, prompt_ids: list[int], token_ids: list[int], temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([prompt_ids + token_ids]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    places = torch.arange(len(prompt_ids) - 1, len(prompt_ids) + len(token_ids) - 1)
    return logprobs[places, torch.tensor(token_ids)]


def test_experts_whose_rows_grouped_mm_cannot_read_are_computed_all_the_same(tmp_path):
    """14 values of 4 bytes."""
    folder = tiny_folder("qwen3_moe", tmp_path, moe_intermediate_size=14)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        model(torch.tensor([[5, 6]]))
    model.set_experts_implementation("eager")
    prompt_ids = prompts(4)
    found = open_engine(folder).generate(requests(prompt_ids, max_tokens=6))
    for ids, (completion,) in zip(prompt_ids, found, strict=True):
        expected = logprobs_by_transformers(model, ids, completion.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("max_rows", [1, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_completions_equal_those_of_generate_token_for_token(model_folders, references, family, max_rows):
    """10 prompts of unequal length: with 1 and 3 rows they wait for each other, and finished rows move."""
    prompt_ids = prompts(10)
    found = open_engine(model_folders[family], max_rows=max_rows).generate(requests(prompt_ids))
    expected = [generated_by_transformers(references[family], ids, 12) for ids in prompt_ids]
    assert [group[0].token_ids for group in found] == expected
    # The comparison means something: the answers differ, and some go on to the end.
    assert len({tuple(tokens) for tokens in expected}) >= 8
    assert sum(len(set(tokens)) > 2 for tokens in expected) >= 4
    assert max(map(len, expected)) == 12


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_equal_a_forward_pass_at_the_temperature(model_folders, references, family, temperature):
    prompt_ids = prompts(6, seed=1)
    engine = open_engine(model_folders[family], max_rows=5)
    found = engine.generate(requests(prompt_ids, temperature=temperature, num_completions=3))
    for ids, group in zip(prompt_ids, found, strict=True):
        for completion in group:
            expected = logprobs_by_transformers(references[family], ids, completion.token_ids, temperature)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs, dtype=torch.float64), expected, atol=1e-5, rtol=0
            )


def test_greedy_logprobs_are_at_temperature_one(model_folders, references):
    completion = open_engine(model_folders["llama"]).generate(requests([[5, 9, 11]]))[0][0]
    expected = logprobs_by_transformers(references["llama"], [5, 9, 11], completion.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), expected, atol=1e-5, rtol=0)


def sampled(engine: EmbeddedEngine, wanted: list[GenerateRequest]) -> dict[str, list[list[int]]]:
    return {
        request.uid: [completion.token_ids for completion in group]
        for request, group in zip(wanted, engine.generate(wanted), strict=True)
    }


@pytest.mark.parametrize("family", families("qwen3", "gemma2"))
def test_draws_do_not_depend_on_batch_order_or_rows(model_folders, family):
    """Requests of 5 completions each on 2, 4 and 64 rows: groups are larger and smaller than the engine."""
    wanted = requests(prompts(6, seed=2), temperature=1.0, num_completions=5)
    together = sampled(open_engine(model_folders[family], max_rows=64), wanted)
    assert len({tuple(tokens) for group in together.values() for tokens in group}) >= 25
    for max_rows in (2, 4):
        assert sampled(open_engine(model_folders[family], max_rows=max_rows), wanted) == together
    engine = open_engine(model_folders[family], max_rows=7)
    assert sampled(engine, wanted[::-1]) == together
    assert {uid: group for request in wanted for uid, group in sampled(engine, [request]).items()} == together


def test_a_completion_keeps_its_draws_when_the_group_grows(model_folders):
    engine = open_engine(model_folders["qwen3"])
    few, many = (
        sampled(engine, requests([[7, 8]], temperature=1.0, num_completions=count))["row 0"] for count in (2, 6)
    )
    assert many[:2] == few


def test_another_seed_or_uid_gives_other_draws(model_folders):
    engine = open_engine(model_folders["qwen3"])
    base = requests([[7, 8, 9]], temperature=1.5, num_completions=4)
    other_seed = requests([[7, 8, 9]], temperature=1.5, num_completions=4, seed=1)
    other_uid = requests([[1], [7, 8, 9]], temperature=1.5, num_completions=4)[1:]
    first, second, third = (next(iter(sampled(engine, wanted).values())) for wanted in (base, other_seed, other_uid))
    assert first != second
    assert first != third
    assert sampled(engine, base)["row 0"] == first


def test_first_tokens_are_distributed_as_the_softmax_of_the_logits(model_folders, references):
    """4,000 draws at temperature 1.3: chi-square over the 48 tokens stays below the 99.99 % quantile for 47 degrees."""
    count, temperature = 4000, 1.3
    wanted = requests([[9, 4, 7]], temperature=temperature, num_completions=count, max_tokens=1)
    group = open_engine(model_folders["llama"], max_rows=512).generate(wanted)[0]
    with torch.no_grad():
        logits = references["llama"](torch.tensor([[9, 4, 7]])).logits[0, -1].double()
    expected = torch.softmax(logits / temperature, dim=-1) * count
    seen = Counter(completion.token_ids[0] for completion in group)
    observed = torch.tensor([seen[token] for token in range(48)], dtype=torch.float64)
    assert float(((observed - expected).square() / expected).sum()) < 96.0
    # The bound can tell temperatures apart.
    untempered = torch.softmax(logits, dim=-1) * count
    assert float(((observed - untempered).square() / untempered).sum()) > 96.0


def test_rows_of_different_temperatures_and_lengths_share_a_batch(model_folders, references):
    engine = open_engine(model_folders["qwen3"], max_rows=4)
    wanted = [
        GenerateRequest(uid="greedy", prompt_ids=[5, 6], max_tokens=9, temperature=0.0),
        GenerateRequest(uid="cold", prompt_ids=[7, 8, 9, 10], max_tokens=4, temperature=0.5, num_completions=2),
        GenerateRequest(uid="hot", prompt_ids=[11], max_tokens=7, temperature=2.0, num_completions=2),
    ]
    greedy, cold, hot = engine.generate(wanted)
    assert greedy[0].token_ids == generated_by_transformers(references["qwen3"], [5, 6], 9)
    for request, group in zip(wanted[1:], (cold, hot), strict=True):
        for completion in group:
            assert len(completion.token_ids) <= request.max_tokens
            expected = logprobs_by_transformers(
                references["qwen3"], request.prompt_ids, completion.token_ids, request.temperature
            )
            torch.testing.assert_close(
                torch.tensor(completion.logprobs, dtype=torch.float64), expected, atol=1e-5, rtol=0
            )


def test_completions_end_at_the_stop_token_or_the_limit_and_say_which(model_folders):
    wanted = requests(prompts(4, seed=3), temperature=1.5, num_completions=40, max_tokens=20)
    completions = [c for group in open_engine(model_folders["qwen3"], max_rows=32).generate(wanted) for c in group]
    reasons = Counter(completion.finish_reason for completion in completions)
    assert len(completions) == 160
    assert min(reasons["stop"], reasons["length"]) > 10
    for completion in completions:
        assert len(completion.logprobs) == len(completion.token_ids)
        assert 3 not in completion.token_ids[:-1]
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] == 3
        else:
            assert len(completion.token_ids) == 20
            assert completion.token_ids[-1] != 3


def test_every_stop_token_of_the_generation_config_ends_a_completion(model_folders, tmp_path):
    folder = shutil.copytree(model_folders["llama"], tmp_path / "many stops")
    first = open_engine(folder).generate(requests([[5, 9, 11]]))[0][0]
    config = GenerationConfig.from_pretrained(folder)
    config.eos_token_id = [3, first.token_ids[2]]
    config.save_pretrained(folder)
    stopped = open_engine(folder).generate(requests([[5, 9, 11]]))[0][0]
    end = first.token_ids.index(first.token_ids[2]) + 1
    assert (stopped.token_ids, stopped.finish_reason) == (first.token_ids[:end], "stop")


def test_a_model_without_a_stop_token_is_refused(references, model_folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folders["llama"])
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(ModelError, match=r"neither generation_config.json nor config.json has an eos_token_id"):
        EmbeddedEngine(model, max_rows=1, device=CPU)


def test_no_requests_give_no_completions(model_folders):
    assert open_engine(model_folders["qwen3"]).generate([]) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_show_in_the_next_completion(model_folders, family, tmp_path):
    """Weights of another model, loaded over the first one's: the engine then is the other model."""
    engine = open_engine(model_folders[family])
    before = sampled(engine, requests(prompts(4)))
    other = AutoModelForCausalLM.from_pretrained(model_folders[family])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(torch.linspace(-1.5, 1.5, parameter.shape[0]).view(-1, *[1] * (parameter.dim() - 1)))
    other.save_pretrained(tmp_path / "other")
    names = [name for name, _ in engine.served_weights()]
    engine.load_weights((name, other.state_dict()[name]) for name in names)
    engine.commit_weights(1)
    after = sampled(engine, requests(prompts(4)))
    assert after == sampled(open_engine(tmp_path / "other"), requests(prompts(4)))
    assert after != before


def test_sleeping_is_refused_on_a_cpu(model_folders):
    with pytest.raises(ConfigError, match=r"rollout\.engine\.sleep_level=1 .* they are there anyway; set it to 0"):
        open_engine(model_folders["llama"], sleep_level=1)


@pytest.mark.parametrize("family", ["qwen3", "llama"], ids=["tied", "untied"])
def test_the_weights_of_a_sleeping_engine_are_on_the_host_and_come_back_as_they_were(model_folders, family):
    def bytes_on_device(engine):
        return sum(weight.untyped_storage().nbytes() for _, weight in engine.served_weights())

    resident, model = open_engine(model_folders[family]), open_engine(model_folders[family])._model
    for weight in model.parameters():
        weight.data = weight.data.clone()  # as on a device: not mapped from the file, which cannot be freed
    engine = EmbeddedEngine(model, max_rows=8, device=CPU, sleep_level=1)
    whole, before = bytes_on_device(engine), sampled(engine, requests(prompts(4)))
    for each in (engine, resident):
        each.sleep()
        each.sleep()
    assert (bytes_on_device(engine), bytes_on_device(resident)) == (0, whole)
    engine.wake("kv_cache")
    with pytest.raises(AssertionError, match="the engine sleeps"):
        engine.generate(requests([[5]]))
    for _ in range(2):
        engine.wake("weights", "kv_cache")
    assert bytes_on_device(engine) == whole
    assert sampled(engine, requests(prompts(4))) == before


def test_served_weights_leave_tied_copies_out(model_folders):
    tied, untied = (dict(open_engine(model_folders[name]).served_weights()) for name in ("qwen3", "llama"))
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in untied
    assert tied["model.embed_tokens.weight"].shape == (48, 32)


def test_completions_carry_the_committed_version(model_folders):
    engine = open_engine(model_folders["qwen3"])
    assert engine.generate(requests([[5]]))[0][0].policy_version == 0
    engine.commit_weights(41)
    assert {c.policy_version for c in engine.generate(requests([[5]], num_completions=3))[0]} == {41}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", r"1 tensor is missing \(model.layers.1.mlp.up_proj.weight\)"),
        ("shape", "cannot be loaded for generation"),
        ("garbage", "cannot be loaded for generation"),
    ],
)
def test_a_folder_whose_weights_do_not_fit_is_refused_rather_than_filled_up(model_folders, tmp_path, damage, message):
    """transformers itself would start the missing tensor from random numbers and warn."""
    folder = shutil.copytree(model_folders["llama"], tmp_path / "damaged")
    file = folder / "model.safetensors"
    weights = load_file(file)
    match damage:
        case "missing":
            del weights["model.layers.1.mlp.up_proj.weight"]
        case "shape":
            weights["model.norm.weight"] = torch.zeros(7)
    save_file(weights, file, metadata={"format": "pt"})
    if damage == "garbage":
        file.write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        open_engine(folder)
    assert "\n" not in str(caught.value)


def texts(token_ids):
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def test_a_completion_ends_where_its_text_holds_a_stop_string(model_folders):
    prompt_ids = prompts(6)
    engine = open_engine(model_folders["qwen3"], max_rows=2, decode=texts)
    whole = [group[0].token_ids for group in engine.generate(requests(prompt_ids, temperature=1.0))]
    stop = sorted({texts(token_ids)[3:5] for token_ids in whole if len(token_ids) > 5})[:2]
    assert len(stop) == 2
    for found, expected in zip(engine.generate(requests(prompt_ids, temperature=1.0, stop=stop)), whole, strict=True):
        text = texts(expected)
        ends = [text.index(one) + 2 for one in stop if one in text]
        assert found[0].token_ids == expected[: min(ends, default=len(expected))]
        assert found[0].finish_reason == ("stop" if ends or expected[-1] == 3 else "length")


def test_own_stop_tokens_and_bad_tokens(model_folders):
    prompt_ids = prompts(6)
    plain = [group[0].token_ids for group in open_engine(model_folders["llama"]).generate(requests(prompt_ids))]
    common = Counter(token for token_ids in plain for token in token_ids[1:-1]).most_common(1)[0][0]
    stopping = open_engine(model_folders["llama"], stop_token_ids=[common]).generate(requests(prompt_ids))
    for found, expected in zip(stopping, plain, strict=True):
        cut = expected.index(common) + 1 if common in expected else len(expected)
        assert found[0].token_ids == expected[:cut]
    without = open_engine(model_folders["llama"], bad_token_ids=[common]).generate(requests(prompt_ids))
    assert not any(common in group[0].token_ids for group in without)
    assert any(group[0].token_ids != expected for group, expected in zip(without, plain, strict=True))
    with pytest.raises(ConfigError, match=r"have 9999, but the model's vocabulary begins at 0 and ends at 47"):
        open_engine(model_folders["llama"], bad_token_ids=[9999])


@pytest.mark.parametrize("max_rows", [2, 16])
def test_restrictions_belong_to_their_request_whatever_else_is_decoded(model_folders, references, max_rows):
    prompt_ids = prompts(5)
    engine = open_engine(model_folders["qwen3"], max_rows=max_rows)
    mixed = [
        replace(request, temperature=1.0, num_completions=3, top_k=index % 3, top_p=(1.0, 0.5)[index % 2])
        for index, request in enumerate(requests(prompt_ids))
    ]
    together = engine.generate(mixed)
    for request, group in zip(mixed, together, strict=True):
        assert [c.token_ids for c in engine.generate([request])[0]] == [c.token_ids for c in group]
        for completion in group:
            expected = logprobs_by_transformers(references["qwen3"], request.prompt_ids, completion.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=1e-4, rtol=0)
            if request.top_k == 1:
                assert completion.token_ids == generated_by_transformers(references["qwen3"], request.prompt_ids, 12)


@pytest.mark.slow  # compiles a model
@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma2", marks=pytest.mark.full)])
def test_a_compiled_decode_step_gives_the_same_completions_from_one_graph(model_folders, family):
    """Batches of 3, 2 and 1 rows, two caches: the number of rows, their spans and the cache are not in the graph."""
    torch.compiler.reset()
    plain, compiled = (
        open_engine(model_folders[family], max_rows=3, compile_decode=compile_decode)
        for compile_decode in (False, True)
    )
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for temperature in (0.0, 1.0):
        wanted = requests(prompts(5), temperature=temperature)
        for found, expected in zip(compiled.generate(wanted), plain.generate(wanted), strict=True):
            assert found[0].token_ids == expected[0].token_ids
            torch.testing.assert_close(
                torch.tensor(found[0].logprobs), torch.tensor(expected[0].logprobs), atol=1e-5, rtol=0
            )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_logits_that_are_no_numbers_end_the_run_and_name_the_row(model_folders):
    engine = open_engine(model_folders["qwen3"])
    weights = dict(engine.served_weights())
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    engine.load_weights([(name, torch.full_like(weights[name], torch.nan))])
    engine.commit_weights(1)
    with pytest.raises(TrainingError, match=r"no distribution for token \d of a completion of row 0: logits"):
        engine.generate(requests(prompts(1)))
