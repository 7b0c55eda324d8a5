"""How vLLM is started: with which arguments, and what is refused."""

import sys

import pytest
from vllm_engines import needs_vllm, open_engine, request, vllm_folder

from shardwise.config import ConfigError, DataError

__all__ = ["vllm_folder"]  # a fixture


def test_without_vllm_the_error_says_how_to_install_it(vllm_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "vllm.platforms", raising=False)  # another test's
    with pytest.raises(ConfigError, match=r"vLLM cannot be imported .*pip install vllm"):
        open_engine(vllm_folder)


@needs_vllm
def test_ranks_that_would_be_left_over_are_refused(vllm_folder):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 does not divide the job's 1 rank, .*process"):
        open_engine(vllm_folder, args={"tensor_parallel_size": 2})


@needs_vllm
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"enforce_eagr": True}, r"args.enforce_eagr: vLLM's EngineArgs have no such argument; did you mean enforce_e"),
        ({"xyzzy": 1}, "args.xyzzy: .* no such argument; see"),
        ({"model": "other"}, "args.model: Shardwise sets this itself, from model.path; set that, and"),
        ({"max_num_seqs": 2}, "args.max_num_seqs: .*, from rollout.max_concurrent_sequences; set"),
        ({"pipeline_parallel_size": 2}, "args.pipeline_parallel_size: .*, no key changes it; remove it"),
        ({"block_size": "large"}, "vLLM cannot start: .*block_size"),
        ({"max_model_len": 4096}, "vLLM cannot start: .*max_model_len"),
    ],
)
def test_arguments_are_checked_by_vllms_own_schema(vllm_folder, args, message):
    with pytest.raises(ConfigError, match=message):
        open_engine(vllm_folder, args=args)


@needs_vllm
def test_keys_and_arguments_reach_vllm(vllm_folder):
    keys = {"enable_chunked_prefill": True, "max_num_batched_tokens": 128, "enable_prefix_caching": False}
    engine = open_engine(vllm_folder, args={"max_model_len": 48}, **keys)
    config = engine._llm.llm_engine.vllm_config
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == 128
    assert config.scheduler_config.max_num_seqs == 4
    assert not config.cache_config.enable_prefix_caching
    with pytest.raises(DataError, match=r"prompt of 2 tokens and its max_tokens=47 .* than the 48 .*max_model_len"):
        engine.generate([request(max_tokens=47)])
