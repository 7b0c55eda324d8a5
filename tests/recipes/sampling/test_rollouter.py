import math
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from tiny_models import reference_logprobs, tiny_folder
from transformers import AutoModelForCausalLM

from shardwise.config import RolloutConfig, TrainingError
from shardwise.recipes.sampling.rollouter import Rollouter
from shardwise.recipes.sampling.sync_gate import SyncGate
from shardwise.rewards import RewardResult
from shardwise.rollout import EmbeddedEngine
from shardwise.types import Completion, Example, GenerateRequest, ImageRef


class Digits:
    """A tokenizer whose tokens are their own text; 0 is special."""

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(str(token) for token in token_ids if token or not skip_special_tokens)

    def get_vocab(self):
        return {str(digit): digit for digit in range(10)}


class Rewards:
    """Scores a text with its value, so that every completion has its own; odd values fail."""

    def __init__(self):
        self.jobs = []

    def score(self, jobs):
        self.jobs += jobs
        return [
            RewardResult(score=-1.0, failure="odd") if int(job.solution_str) % 2 else RewardResult(
                score=float(job.solution_str), parts={"half": int(job.solution_str) / 2}
            )
            for job in jobs
        ]  # fmt: skip


def answer(rank, requests):
    """The completions of prompt [p] are p0, p1, ... as digits, from whichever rank."""
    return [
        [
            Completion(
                token_ids=[*request.prompt_ids, index, 0], logprobs=[0.0] * 3, finish_reason="stop", policy_version=rank
            )
            for index in range(1, 1 + request.num_completions)
        ]
        for request in requests
    ]


def test_a_completion_is_decoded_once(fake_group):
    """Its tokens are most of what rank 0 has to do."""

    class Counting(Digits):
        num_calls = 0

        def decode(self, token_ids, skip_special_tokens=False):
            self.num_calls += 1
            return super().decode(token_ids, skip_special_tokens)

    tokenizer = Counting()
    rollouter = Rollouter(
        fake_group(1, generate=answer), tokenizer, RolloutConfig(max_response_tokens=9), Rewards(), max_prompt_tokens=9
    )
    prompts = tokenizer.num_calls
    examples = [Example(uid="row", prompt_ids=[4], prompt="4", data_source="s", ground_truth=None)]
    (found,) = rollouter.collect(examples, num_completions=3, temperature=1.0, seed=0, stream="step 1")
    assert found.texts == found.answers == ["41", "42", "43"]
    assert tokenizer.num_calls - prompts <= 6  # of each the completion, and what was before its last turn


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_example_gets_its_own_completions_texts_and_scores(fake_group, size):
    group, rewards = fake_group(size, generate=answer), Rewards()
    rollouter = Rollouter(group, Digits(), RolloutConfig(max_response_tokens=9), rewards, max_prompt_tokens=9)
    examples = [
        Example(uid=f"row {p}", prompt_ids=[p], prompt=str(p), data_source="s", ground_truth=p, extra_info={"p": p})
        for p in (4, 9, 2, 7, 5)
    ]
    groups = rollouter.collect(examples, num_completions=3, temperature=0.5, seed=8, stream="step 2")
    for place, (found, p) in enumerate(zip(groups, (4, 9, 2, 7, 5), strict=True)):
        assert found.example is examples[place]
        assert found.texts == [f"{p}1", f"{p}2", f"{p}3"]
        assert found.rewards == [-1.0, 10.0 * p + 2, -1.0]
        assert found.reward_parts == [{}, {"half": (10 * p + 2) / 2}, {}]
        assert found.failed == [True, False, True]
        assert [c.token_ids for c in found.completions] == [[p, i, 0] for i in (1, 2, 3)]
        assert {c.policy_version for c in found.completions} == {place % size}
    ((_, shards),) = group.calls
    assert sum(map(len, shards)) == 5
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    request = shards[0][0]
    assert (request.uid, request.seed, request.max_tokens, request.temperature) == ("step 2/0/row 4", 8, 9, 0.5)
    assert [(job.uid, job.ground_truth, job.extra_info) for job in rewards.jobs[3:6]] == [
        ("row 9", 9, {"p": 9, "num_response_tokens": 3})
    ] * 3


def test_the_jobs_of_an_example_share_its_images(fake_group):
    """A copy of the file's bytes for every completion would be most of a large group's memory."""
    rewards = Rewards()
    rollouter = Rollouter(fake_group(1, generate=answer), Digits(), RolloutConfig(), rewards, max_prompt_tokens=9)
    sizes = {"num_patches": 4, "num_tokens": 1, "size": [1, 2, 2]}
    image_refs = [
        ImageRef(name="it", data=torch.tensor([7, 8], dtype=torch.uint8), **sizes),
        ImageRef(name="other", path="a.png", **sizes),
    ]
    asked = [{"role": "user", "content": "<image>\n4<image>"}]
    example = Example(
        uid="row 4", prompt_ids=[4], prompt="4", data_source="s", ground_truth=4, messages=asked, image_refs=image_refs
    )
    rollouter.collect([example], num_completions=2, temperature=1.0, seed=8, stream="step 2")
    first, second = rewards.jobs
    assert (first.messages, first.images) == (asked, [b"\x07\x08", "a.png"])
    assert all(one is same for one, same in zip(first.images, second.images, strict=True))


def test_f37_a_logprob_that_is_no_number_is_named_whatever_engine_gave_it(fake_group):
    """-inf is one that can be: it is clamped and counted where it is compared."""

    def spoilt(value):
        def give(rank, requests):
            groups = answer(rank, requests)
            groups[0][1].logprobs[2] = value
            return groups

        rollouter = Rollouter(fake_group(1, generate=give), Digits(), RolloutConfig(), Rewards(), max_prompt_tokens=9)
        example = Example(uid="row 4", prompt_ids=[4], prompt="4", data_source="s", ground_truth=4)
        return rollouter.collect([example], num_completions=3, temperature=1.0, seed=8, stream="step 2")

    assert spoilt(-math.inf)[0].completions[1].logprobs[2] == -math.inf
    with pytest.raises(TrainingError, match=r"^completion 1 of step 2/0/row 4 has a logprob that is no number: "):
        spoilt(math.nan)


def test_ranks_that_are_one_engine_are_asked_the_same_together(fake_group):
    """The group gives a shard to as many neighbours as there are more ranks than shards."""
    engine = {"type": "vllm", "args": {"tensor_parallel_size": 2}}
    group = fake_group(4, generate=answer)
    rollouter = Rollouter(group, Digits(), RolloutConfig(engine=engine), None, max_prompt_tokens=9)
    requests = [
        GenerateRequest(uid=str(key), prompt_ids=[key], max_tokens=9, temperature=1.0, prefix_key=key)
        for key in range(5)
    ]
    found = rollouter._generate(requests)
    assert [group[0].token_ids[0] for group in found] == [0, 1, 2, 3, 4]
    ((_, shards),) = group.calls
    assert [[request.prefix_key for request in shard] for shard in shards] == [[0, 2, 4], [1, 3]]


def test_turns_of_an_episode_go_to_the_rank_that_knows_its_beginning(fake_group):
    """Where the engine keeps prefixes; else requests are dealt out evenly."""
    for engine, expected in (("vllm", [[0, 3], [], [2, 5]]), ("embedded", [[0, 5], [2], [3]])):
        group = fake_group(3, generate=answer)
        rollouter = Rollouter(group, Digits(), RolloutConfig(engine=engine), None, max_prompt_tokens=9)
        requests = [
            GenerateRequest(uid=str(key), prompt_ids=[key], max_tokens=9, temperature=1.0, prefix_key=key)
            for key in (0, 2, 3, 5)
        ]
        found = rollouter._generate(requests)
        assert [group[0].token_ids[0] for group in found] == [0, 2, 3, 5]
        ((_, shards),) = group.calls
        assert [[request.prefix_key for request in shard] for shard in shards] == expected


def test_the_same_row_twice_in_a_step_gets_draws_of_its_own(fake_group):
    group = fake_group(1, generate=answer)
    example = Example(uid="row", prompt_ids=[4], prompt="", data_source="s", ground_truth="")
    rollouter = Rollouter(group, Digits(), RolloutConfig(), Rewards(), max_prompt_tokens=9)
    rollouter.collect([example, example], num_completions=1, temperature=1.0, seed=0, stream="step 1")
    ((_, (requests,)),) = group.calls
    assert len({request.uid for request in requests}) == 2


def test_without_rewards_an_environment_that_fails_stops_the_run(fake_group, tmp_path, monkeypatch):
    """There is no policy for failures that would say what else to do."""
    monkeypatch.chdir(tmp_path)
    (path := Path("broken.py")).write_text(
        "class Broken:\n    def reset(self, example):\n        raise ValueError('away')\n"
        "    def step(self, response): ...\n    def reward(self): ...\n    def close(self): ...\n"
    )
    config = RolloutConfig(environment=f"{path}:Broken")
    example = Example(uid="row", prompt_ids=[4], prompt="", data_source="s", ground_truth="")
    failure = r"^the environment failed for row row: reset\(\) failed: ValueError: away"
    with (
        Rollouter(fake_group(1, generate=answer), Digits(), config, None, max_prompt_tokens=9) as rollouter,
        pytest.raises(TrainingError, match=failure),
    ):
        rollouter.collect([example], num_completions=1, temperature=1.0, seed=0, stream="step 1")


class Interruptions:
    """Two ranks with an embedded engine each, whose calls are interrupted after so many looks at whether they are."""

    def __init__(self, folder, looks, *, between=lambda engines: None):
        open_engine = partial(EmbeddedEngine.from_folder, folder, dtype=torch.float32, device=torch.device("cpu"))
        self.engines = [open_engine(max_rows=3, decode=Letters().decode) for _ in range(2)]
        self.looks, self.between, self.num_calls = looks, between, 0

    def generate(self, rank, requests):
        if rank == 0:
            if self.num_calls:
                self.between(self.engines)
            self.num_calls += 1
        looks = count()
        return self.engines[rank].generate(requests, is_interrupted=lambda: next(looks) >= self.looks)


class Letters:
    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


def sampled(fake_group, ranks, *, stop=()):
    """Five prompts, four completions each, of up to 15 tokens."""
    config = RolloutConfig(max_response_tokens=15, stop=list(stop))
    group, sync_gate = fake_group(2, generate=ranks.generate), SyncGate(lambda: None, timeout_seconds=20)
    rollouter = Rollouter(group, Letters(), config, None, max_prompt_tokens=9, sync_gate=sync_gate)
    examples = [
        Example(uid=f"row {p}", prompt_ids=list(range(10, 10 + p)), prompt="", data_source="s", ground_truth="")
        for p in (4, 9, 2, 7, 5)
    ]
    groups = rollouter.collect(examples, num_completions=4, temperature=0.9, seed=8, stream="step 2")
    return examples, [group.completions for group in groups]


@pytest.mark.parametrize(("family", "looks"), [("qwen3", 1), ("gemma2", 4)])
def test_completions_that_were_interrupted_are_those_that_were_not(fake_group, tmp_path, family, looks):
    folder = tiny_folder(family, tmp_path / family)
    _, whole = sampled(fake_group, Interruptions(folder, 10_000))
    text = Letters().decode(whole[0][0].token_ids)
    for stop in ([], [text[2:5]]):  # the stop string is begun in one call and ended in another
        ranks = Interruptions(folder, looks)
        _, whole = sampled(fake_group, Interruptions(folder, 10_000), stop=stop)
        _, found = sampled(fake_group, ranks, stop=stop)
        assert ranks.num_calls > 4
        for group, expected in zip(found, whole, strict=True):
            for one, other in zip(group, expected, strict=True):
                assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
                assert (one.num_turns, one.is_sampled, one.token_versions) == (1, None, None)
    assert whole[0][0].finish_reason == "stop"


def test_each_token_carries_the_version_that_sampled_it_and_its_logprob(fake_group, tmp_path):
    """The weights are scaled between the calls; every token's logprob is that of the model at its version."""
    folder, scales = tiny_folder("qwen3", tmp_path / "qwen3"), [1.0]

    def serve_new_weights(engines):
        scales.append(scales[-1] * 0.8)
        for engine in engines:
            engine.load_weights([(name, tensor * 0.8) for name, tensor in engine.served_weights() if "mlp" in name])
            engine.commit_weights(len(scales) - 1)

    ranks = Interruptions(folder, 5, between=serve_new_weights)
    examples, groups = sampled(fake_group, ranks)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in scales]
    for model, scale in zip(models, scales, strict=True):
        for name, weight in model.named_parameters():
            weight.data *= scale if "mlp" in name else 1.0
    several = 0
    for example, group in zip(examples, groups, strict=True):
        for completion in group:
            versions = completion.versions
            assert versions == sorted(versions)
            assert (completion.policy_version, completion.newest_version) == (versions[0], versions[-1])
            tokens = torch.tensor(example.prompt_ids + completion.token_ids)
            with torch.no_grad():
                by_version = {v: reference_logprobs(models[v], tokens, temperature=0.9) for v in set(versions)}
            expected = [by_version[v][len(example.prompt_ids) + place] for place, v in enumerate(versions)]
            assert completion.logprobs == pytest.approx(torch.stack(expected).tolist(), abs=1e-4)
            several += completion.token_versions is not None
    assert several > 5
