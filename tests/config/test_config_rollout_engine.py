import pytest

from shardwise.config import (
    ConfigError,
    EmbeddedRollout,
    EngineProcessConfig,
    EvalConfig,
    RLConfig,
    SamplingConfig,
    SglangRollout,
    VllmRollout,
)

KINDS = ("embedded", "vllm", "sglang")
TREE = {"model": {"path": "m"}, "data": {"train_files": "a.jsonl"}, "reward": {"functions": "a.py:b"}}


def parse(**rollout):
    return RLConfig.parse({**TREE, "rollout": rollout}, origin="test").rollout


def test_a_name_alone_stands_for_the_defaults_of_that_engine():
    assert parse().engine == parse(engine="embedded").engine == EmbeddedRollout()
    assert parse(engine="vllm").engine == parse(engine={"type": "vllm"}).engine == VllmRollout()
    assert parse(engine="sglang").engine == SglangRollout()
    given = parse(engine={"type": "vllm", "sleep_level": 1, "args": {"enforce_eager": True}})
    assert given.engine == VllmRollout(sleep_level=1, args={"enforce_eager": True})
    assert given.sampling().engine == given.engine
    assert SamplingConfig.model_validate_json(given.sampling().model_dump_json()).engine == given.engine


@pytest.mark.parametrize("kind", ["embedded", "vllm"])
def test_every_engine_may_have_a_process_and_then_stand_apart(kind):
    assert parse(engine=kind).engine.process is None
    given = parse(engine={"type": kind, "process": {}}, placement="split")
    assert given.engine.process == EngineProcessConfig()
    tree = ["model.path=m", "data.train_files=a.jsonl", "reward.functions=a.py:b", f"rollout.engine={kind}"]
    process = RLConfig.load(None, [*tree, "rollout.engine.process.max_restarts=1"]).rollout.engine.process
    assert process == EngineProcessConfig(max_restarts=1)


def test_a_model_is_cut_over_neighbouring_ranks_or_over_workers_of_each():
    cut = {"type": "vllm", "args": {"tensor_parallel_size": 2}}
    sizes = {}
    for name, engine in {"cut": cut, "workers": {**cut, "process": {}}, "whole": "vllm"}.items():
        found = parse(engine=engine).engine
        sizes[name] = (found.tensor_parallel_size, found.ranks_per_engine)
    assert sizes == {"cut": (2, 2), "workers": (2, 1), "whole": (1, 1)}
    assert {parse(engine=engine).engine.ranks_per_engine for engine in ("embedded", "sglang")} == {1}


def test_tokens_are_banned_where_logprobs_stay_those_of_the_policy():
    found = {kind: [parse(engine=kind).engine.may_ban_tokens(t) for t in (1.0, 0.7)] for kind in KINDS}
    assert found == {"embedded": [True, True], "vllm": [True, False], "sglang": [False, False]}


def test_an_override_chooses_the_engine():
    tree = ["model.path=m", "data.validation_files=a.jsonl", "reward.functions=a.py:b"]
    assert EvalConfig.load(None, [*tree, "rollout.engine=vllm"]).rollout.engine == VllmRollout()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "vlm"}, r"rollout.engine=vlm: did you mean vllm\? use one of embedded, vllm, sglang"),
        ({"engine": 3}, "expected a group of keys with type=embedded or vllm or sglang"),
        ({"engine": {"gpu_memory_utilization": 0.3}}, "rollout.engine"),
        ({"engine": {"type": "embedded", "args": {}}}, "type=embedded has no such key"),
        ({"engine": {"type": "vllm", "gpu_memory_utilization": 1.5}}, "less than or equal to 1"),
        ({"engine": {"type": "vllm", "max_num_batched_tokens": 0}}, "greater than 0"),
        ({"engine": {"type": "vllm", "sleep_level": 3}}, "0, 1 or 2"),
        (
            {"engine": "vllm", "placement": "split"},
            r"placement=split with engine=vllm: .*set rollout.engine.process=\{\}",
        ),
        (
            {"engine": {"type": "vllm", "args": {"tensor_parallel_size": "2"}}},
            "tensor_parallel_size='2': give how many",
        ),
        (
            {"engine": {"type": "vllm", "args": {"tensor_parallel_size": True}}},
            "tensor_parallel_size=True: give how many",
        ),
        ({"engine": {"process": {"max_restarts": -1}}}, "greater than or equal to 0"),
        ({"engine": {"process": {"health_timeout_seconds": 0}}}, "greater than 0"),
        ({"engine": {"process": {"restarts": 3}}}, "max_restarts"),
        ({"engine": {"type": "sglang", "mem_fraction_static": 1.0}}, "less than 1"),
        ({"engine": {"type": "sglang", "sleep_level": 3}}, "0, 1 or 2"),
    ],
)
def test_what_cannot_work_is_refused(rollout, message):
    with pytest.raises(ConfigError, match=message):
        parse(**rollout)


@pytest.mark.parametrize(("type_", "key"), [("vllm", "max_model_len"), ("sglang", "context_length")])
def test_a_limit_that_is_true_is_no_number(type_, key):
    assert parse(engine={"type": type_, "args": {key: True}}).engine.context_limit is None
    for given in (2000, "2000"):
        assert parse(engine={"type": type_, "args": {key: given}}).engine.context_limit[1] == 2000
