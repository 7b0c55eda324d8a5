"""What is SGLang's own, beside the contract of every engine (tests/contract), on the stub of tests/sglang_stub."""

import sys
from pathlib import Path

import pytest
import torch
from stubbed_sglang import GPU, open_engine, request
from transformers import LlamaForCausalLM

from shardwise.config import ConfigError, ModelError, SglangRollout, TrainingError
from shardwise.families import GridTower
from shardwise.rollout import SglangEngine, sglang
from shardwise.rollout.sampling import stream_key


@pytest.fixture(scope="module")
def folder(model_folders):
    return model_folders["llama"]


def weights_of(folder) -> dict[str, torch.Tensor]:
    return dict(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def test_what_cannot_work_is_refused_before_a_server_starts(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"python=/no/python: there is no such program"):
        open_engine(folder, python="/no/python")
    with pytest.raises(ConfigError, match=r"weights_folder=/no/folder has 0.0 GiB free"):
        open_engine(folder, weights_folder="/no/folder")
    options = {"dtype": torch.float32, "max_rows": 4}
    with pytest.raises(ConfigError, match=r"needs an accelerator: only in its deterministic mode"):
        SglangEngine.from_folder(folder, SglangRollout(), device=torch.device("cpu"), **options)
    config = SglangRollout(python=sys.executable)
    with pytest.raises(ConfigError, match=r"bad_token_ids with engine=sglang: it can give no logprobs of the policy"):
        SglangEngine.from_folder(folder, config, device=GPU, bad_token_ids=[5], **options)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = 9
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"config.json ends completions at token 3, generation_config.json does not"):
        open_engine(tmp_path)


def test_requests_travel_as_sglang_takes_them(sglang_engine, sglang_journal):
    wanted = [request(num_completions=2, top_k=3, top_p=0.9, seed=8), request(uid="b", temperature=0.0, top_k=3)]
    assert [len(group) for group in sglang_engine.generate(wanted)] == [2, 1]
    (asked,) = [event["body"] for event in sglang_journal() if event.get("path") == "/generate"][-1:]
    shared = {"max_new_tokens": 4, "stop_token_ids": [7], "stop": None}
    drawn = {**shared, "temperature": 1.0, "top_k": 3, "top_p": 0.9}
    assert asked == {
        "input_ids": [[5, 6]] * 3,
        "sampling_params": [
            {**drawn, "sampling_seed": stream_key(8, "a", 0)},
            {**drawn, "sampling_seed": stream_key(8, "a", 1)},
            {**shared, "temperature": 0.0, "sampling_seed": stream_key(0, "b", 0)},
        ],
        "return_logprob": True,
        "logprob_start_len": -1,
    }


def test_a_stop_string_in_more_tokens_than_the_tokenizer_writes_it_with_ends_a_completion(sglang_engine, monkeypatch):
    """SGLang looks for it in the last few tokens alone, and goes on."""
    entries = [[-0.5 * place, ord(char), None] for place, char in enumerate("a stop, and on")]
    version = str(sglang_engine._readiness.version)
    meta = {"weight_version": version, "finish_reason": {"type": "length"}, "output_token_logprobs": entries}
    monkeypatch.setattr(sglang_engine, "_run", lambda prompts, params: [{"meta_info": meta}] * len(prompts))
    monkeypatch.setattr(sglang_engine, "_decode", lambda token_ids: "".join(map(chr, token_ids)))
    for stop, said in ((["stop", "on"], "a stop"), (["never"], "a stop, and on")):
        ((found,),) = sglang_engine.generate([request(stop=stop, max_tokens=14)])
        assert "".join(map(chr, found.token_ids)) == said
        assert found.logprobs == [-0.5 * place for place in range(len(said))]
        assert found.finish_reason == ("stop" if said == "a stop" else "length")


def test_what_sglang_cannot_sample_or_show_is_refused(sglang_engine):
    with pytest.raises(ConfigError, match=r"a has min_p=0\.1 with engine=sglang: it cannot draw so"):
        sglang_engine.generate([request(min_p=0.1)])
    assert sglang_engine.generate([request(min_p=0.1, temperature=0.0)])
    seen = GridTower(merge_size=2, num_values=96).black()
    with pytest.raises(ConfigError, match="has images, which Shardwise does not pass on to SGLang"):
        sglang_engine.generate([request(images=seen)])
    with pytest.raises(ConfigError, match="the modules of a server cannot be seen"):
        sglang_engine.trace()


def test_a_completion_that_the_server_cuts_short_is_an_error_and_not_a_sample(sglang_engine):
    with pytest.raises(TrainingError, match=r"answered /generate with status 400: .*maximum context length of 40"):
        sglang_engine.generate([request(max_tokens=39)])
    many = [request(prompt_ids=[prompt, 6], max_tokens=38, temperature=0.0) for prompt in range(8, 40)]
    with pytest.raises(TrainingError, match=r"ended a completion of a after 36 of max_tokens=38: .*raise context_len"):
        sglang_engine.generate(many)  # one of them does not end by itself


def test_a_completion_of_another_version_is_an_error(sglang_engine):
    sglang_engine._server.administer("/update_weight_version", {"new_version": "9", "abort_all_requests": False})
    with pytest.raises(TrainingError, match="the SGLang server of rank 0 sampled with version 9, 0 is due"):
        sglang_engine.generate([request()])
    sglang_engine.commit_weights(0)
    assert sglang_engine.generate([request()])


def test_weights_pass_through_files_that_are_gone_afterwards(
    folder, sglang_engine, sglang_journal, weights_folder, monkeypatch
):
    monkeypatch.setattr(sglang, "_BUCKET_BYTES", 4000)
    before = sglang_engine.generate([request()])
    weights = weights_of(folder)
    num_updates = sum(event.get("path") == "/update_weights_from_disk" for event in sglang_journal())

    sglang_engine.load_weights((name, 2 * tensor) for name, tensor in weights.items())
    sglang_engine.commit_weights(1)
    doubled = sglang_engine.generate([request()])
    assert doubled[0][0].logprobs != before[0][0].logprobs
    assert list(weights_folder.iterdir()) == []

    sglang_engine.load_weights(item for item in weights.items() if item[0] != "model.norm.weight")
    updates = [event["body"] for event in sglang_journal() if event.get("path") == "/update_weights_from_disk"]
    assert len(updates) == num_updates + 1, "an incomplete sync does not reach the server"
    assert updates[-1]["load_format"] == "safetensors"
    assert Path(updates[-1]["model_path"]).parent == weights_folder
    with pytest.raises(RuntimeError, match=r"version 2 cannot be committed to .*: .* not bring model.norm.weight"):
        sglang_engine.commit_weights(2)
    sglang_engine.load_weights(weights.items())
    sglang_engine.commit_weights(0)
    assert sglang_engine.generate([request()]) == before


def test_weights_that_give_no_numbers_are_an_error(folder, sglang_engine):
    weights = weights_of(folder)
    norm = weights["model.norm.weight"]
    sglang_engine.load_weights((weights | {"model.norm.weight": norm * torch.nan}).items())
    sglang_engine.commit_weights(0)
    with pytest.raises(TrainingError, match="gives no distribution for a token"):
        sglang_engine.logprobs([[5, 6, 7]])
    sglang_engine.load_weights(weights.items())
    sglang_engine.commit_weights(0)


def test_weights_that_find_no_room_are_an_error(folder, sglang_engine, monkeypatch):
    weights = weights_of(folder)
    with monkeypatch.context() as patch:
        patch.setattr(sglang, "save_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(TrainingError, match=r"weights for SGLang cannot be written to .*No space left"):
            sglang_engine.load_weights(weights.items())
    sglang_engine.load_weights(weights.items())
    sglang_engine.commit_weights(0)


def test_parts_wake_in_stages_and_dropped_weights_are_not_generated_with(folder, sglang_engine, sglang_journal):
    start = len(sglang_journal())
    for _ in range(2):
        sglang_engine.sleep()
    sglang_engine.wake("weights")
    with pytest.raises(TrainingError, match="sleep_level=2 dropped the weights, and no weight sync came since"):
        sglang_engine.generate([request()])
    sglang_engine.load_weights(weights_of(folder).items())
    sglang_engine.commit_weights(0)
    for _ in range(2):
        sglang_engine.wake("weights", "kv_cache")
    assert sglang_engine.generate([request()])
    calls = [(event["path"], event["body"].get("tags")) for event in sglang_journal()[start:]]
    assert calls == [
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/update_weights_from_disk", None),
        ("/update_weight_version", None),
        ("/resume_memory_occupation", ["kv_cache"]),
        ("/generate", None),
    ]
