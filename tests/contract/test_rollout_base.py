"""What every rollout engine has to do, against transformers. A new engine adds itself to KINDS in conftest.py."""

from dataclasses import replace
from itertools import combinations, count

import pytest
import torch
from transformers import GenerationConfig

from shardwise.config import ConfigError, DataError
from shardwise.ops import Place, traced
from shardwise.recipes.sampling.rollouter import rest_of
from shardwise.rollout import SupervisedEngine
from shardwise.types import GenerateRequest

EOS = 3
FAMILIES = ["qwen3", "llama"]
LONG = 150
"""Tokens of a prompt that spans more than one block of a prefix cache."""


def prompts(count: int, *, seed: int = 0, longest: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(5, 200, (length,), generator=generator).tolist() for length in lengths]


def requests(prompt_ids: list[list[int]], **options) -> list[GenerateRequest]:
    settings = {"max_tokens": 12, "temperature": 0.0, **options}
    return [GenerateRequest(uid=f"row {i}", prompt_ids=ids, **settings) for i, ids in enumerate(prompt_ids)]


def tokens(groups) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def generated_in_pieces(engine, wanted, *, between=lambda: None, is_enough=lambda groups, num_parts: num_parts > 2):
    """Completions of three calls that are interrupted and one that is not, and how many parts the longest has."""
    if not isinstance(engine, SupervisedEngine):
        return _in_pieces(engine, wanted, between, looks=13)
    for _ in range(20):  # a process is told of an interruption some time after it began, when it may be done
        groups, num_parts = _in_pieces(engine, wanted, between, looks=2)
        if is_enough(groups, num_parts):
            break
    return groups, num_parts


def _in_pieces(engine, wanted, between, looks):
    def call(requests, *, is_last=False):
        seen = count()
        return engine.generate(requests, is_interrupted=lambda: not is_last and next(seen) >= looks)

    groups, num_parts = call(wanted), 1
    while rest := [(place, part) for place, one in enumerate(wanted) for part in rest_of(one, groups[place])]:
        between()
        for (place, part), more in zip(rest, call([part for _, part in rest], is_last=num_parts == 3), strict=True):
            for index, completion in enumerate(more, start=part.first_index):
                groups[place][index] = groups[place][index].then(completion)
        num_parts += 1
    return groups, num_parts


def generated_by_transformers(model, prompt_ids: list[int], max_tokens: int) -> list[int]:
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=EOS, pad_token_id=0)
    output = model.generate(torch.tensor([prompt_ids]), generation_config=config)
    return output[0, len(prompt_ids) :].tolist()


@torch.no_grad()
def logprobs_by_transformers(model, prompt_ids: list[int], token_ids: list[int], temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([prompt_ids + token_ids]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    places = torch.arange(len(prompt_ids) - 1, len(prompt_ids) + len(token_ids) - 1)
    return logprobs[places, torch.tensor(token_ids)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_completions_equal_those_of_generate_token_for_token(open_engine, references, family):
    """10 prompts in 8 rows, one of them long."""
    prompt_ids = [*prompts(9), *prompts(1, seed=7, longest=2)]
    prompt_ids[4] = (prompt_ids[4] * LONG)[:LONG]
    found = open_engine(family).generate(requests(prompt_ids))
    expected = [generated_by_transformers(references[family], ids, 12) for ids in prompt_ids]
    assert tokens(found) == [[ids] for ids in expected]
    assert len({tuple(ids) for ids in expected}) >= 8  # the comparison means something
    for group, ids in zip(found, expected, strict=True):
        assert group[0].finish_reason == ("stop" if ids[-1] == EOS else "length")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.25)], ids=["float32", "bf16"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_trap_09_sampled_logprobs_are_of_the_policy_at_the_temperature(
    open_engine, references, temperature, dtype, bound
):
    """Against a float32 forward. bfloat16 keeps 8 bits of logits up to 20 and of everything before them."""
    prompt_ids = prompts(4, seed=1)
    engine = open_engine("llama", dtype=dtype, temperature=temperature)
    found = engine.generate(requests(prompt_ids, temperature=temperature, num_completions=3))
    for ids, group in zip(prompt_ids, found, strict=True):
        for completion in group:
            expected = logprobs_by_transformers(references["llama"], ids, completion.token_ids, temperature)
            difference = torch.tensor(completion.logprobs, dtype=torch.float64) - expected
            assert difference.abs().max() < bound


def test_greedy_logprobs_are_at_temperature_one_whatever_the_samples_have(open_engine, references):
    prompt_ids = prompts(4, seed=2)
    for temperature in (0.7, 1.0):
        engine = open_engine("llama", temperature=temperature)
        sampled = requests(prompt_ids, temperature=temperature)
        mixed = engine.generate([*requests(prompt_ids), *(replace(r, uid=f"s{r.uid}") for r in sampled)])
        for ids, group in zip(prompt_ids, mixed[:4], strict=True):
            expected = logprobs_by_transformers(references["llama"], ids, group[0].token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(group[0].logprobs).double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}])
def test_trap_09_what_is_left_out_changes_no_logprob(open_engine, kind, references, limits):
    if kind.startswith("sglang") and "min_p" in limits:
        pytest.skip("SGLang cannot, and SglangEngine refuses")
    prompt_ids = prompts(4, seed=3)
    found = open_engine("llama").generate(requests(prompt_ids, temperature=1.0, num_completions=4, **limits))
    for ids, group in zip(prompt_ids, found, strict=True):
        for completion in group:
            expected = logprobs_by_transformers(references["llama"], ids, completion.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, atol=2e-5, rtol=0)
            if "min_p" in limits:  # no token is drawn whose share of the likeliest one's probability is smaller
                assert (expected - _likeliest(references["llama"], ids, completion.token_ids)).min() >= -1.7


@torch.no_grad()
def _likeliest(model, prompt_ids, token_ids) -> torch.Tensor:
    logits = model(torch.tensor([prompt_ids + token_ids]), use_cache=False).logits[0].double()
    return torch.log_softmax(logits, dim=-1).max(dim=-1).values[len(prompt_ids) - 1 : -1]


def test_first_tokens_are_distributed_as_the_softmax_of_the_logits(open_engine, references):
    """4,000 draws; chi-square over the 20 likeliest tokens and the rest stays below its 1e-6 quantile, 69.6."""
    (prompt,) = prompts(1, seed=4, longest=6)
    engine = open_engine("llama", temperature=0.7)
    ((*drawn,),) = engine.generate(requests([prompt], temperature=0.7, num_completions=4000, max_tokens=1))
    with torch.no_grad():
        shares = torch.softmax(references["llama"](torch.tensor([prompt])).logits[0, -1].double() / 0.7, dim=-1)
    likeliest = shares.topk(20).indices
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=len(shares))
    seen = torch.cat([counts[likeliest], counts.sum()[None] - counts[likeliest].sum()]).double()
    expected = 4000 * torch.cat([shares[likeliest], 1 - shares[likeliest].sum()[None]])
    assert ((seen - expected) ** 2 / expected.clamp(min=1)).sum() < 69.6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_has_what_the_modules_of_transformers_compute(not_in_a_server, open_engine, references, family):
    (prompt,) = prompts(1, seed=5, longest=9)
    engine, reference = open_engine(family), references[family]
    if isinstance(engine, SupervisedEngine):
        with pytest.raises(ConfigError, match="cannot be traced from another process"):
            engine.trace()
        return
    with engine.trace() as tracing:
        engine.logprobs([prompt])
    with traced(reference.named_modules()) as expecting, torch.no_grad():
        reference(torch.tensor([prompt]))
    found, expected = tracing.of_passes([len(prompt)]), expecting.of_passes([len(prompt)])
    compared = {place for place in found if place in expected and found[place].shape == expected[place].shape}
    layer = [
        Place("model.layers.1.input_layernorm", "output"),
        Place("model.layers.1.self_attn.o_proj", "input"),
        Place("model.layers.1.self_attn.o_proj", "output"),
        Place("model.layers.1.mlp.down_proj", "input"),
        Place("model.layers.1", "output"),
    ]
    assert {Place("model.embed_tokens", "output"), *layer, Place("model.norm", "output")} <= compared
    for place in compared:
        torch.testing.assert_close(found[place], expected[place], atol=1e-4, rtol=1e-4, msg=str(place))
    engine.logprobs([prompt])
    assert tracing.of_passes([len(prompt)]).keys() == found.keys()  # nothing is kept after it


def test_results_are_in_the_order_of_the_requests_with_the_number_asked_for(open_engine):
    wanted = [
        replace(request, num_completions=1 + i % 4, max_tokens=1 + i) for i, request in enumerate(requests(prompts(7)))
    ]
    found = open_engine("llama").generate(wanted)
    assert [len(group) for group in found] == [1, 2, 3, 4, 1, 2, 3]
    for request, group in zip(wanted, found, strict=True):
        for completion in group:
            assert len(completion.logprobs) == len(completion.token_ids) <= request.max_tokens
            assert max(completion.logprobs) <= 0.0
            assert (completion.finish_reason == "length") == (completion.token_ids[-1] != EOS)
            assert completion.finish_reason == "stop" or len(completion.token_ids) == request.max_tokens
    assert open_engine("llama").generate([]) == []


def test_draws_do_not_depend_on_what_else_is_decoded(open_engine):
    """In float32, where rounding does not move a draw across the border between two tokens."""
    engine = open_engine("llama")
    wanted = requests(prompts(6, seed=5), temperature=1.0, num_completions=3)
    together = tokens(engine.generate(wanted))
    assert [tokens(engine.generate([request]))[0] for request in wanted] == together
    assert tokens(engine.generate(wanted[::-1]))[::-1] == together
    larger = tokens(engine.generate([replace(request, num_completions=5) for request in wanted]))
    assert [group[:3] for group in larger] == together
    later = tokens(engine.generate([replace(request, num_completions=2, first_index=1) for request in wanted]))
    assert later == [group[1:] for group in together]
    assert len({tuple(ids) for group in together for ids in group}) == 18


def test_every_request_is_told_once_when_it_is_finished(open_engine):
    finished: list[int] = []
    wanted = [replace(r, num_completions=1 + i % 3) for i, r in enumerate(requests(prompts(5)))]
    open_engine("llama").generate(wanted, on_finished=finished.append)
    assert sorted(finished) == list(range(5))


def test_another_seed_or_uid_gives_other_draws(open_engine):
    engine = open_engine("llama")
    (request,) = requests(prompts(1, seed=6), temperature=1.0)
    first = tokens(engine.generate([request]))
    assert tokens(engine.generate([request])) == first
    assert tokens(engine.generate([replace(request, seed=1)])) != first
    assert tokens(engine.generate([replace(request, uid="another")])) != first


def test_what_goes_on_behind_a_token_is_drawn_anew(open_engine, references):
    """Requests of one uid, as the turns of an episode are. However often a prompt repeats its only token, attention
    finds the same, so the next one has one distribution p: of independent draws a share of sum p^2 is equal, within 5
    standard deviations."""
    engine, num_draws = open_engine("llama"), 500
    (request,) = requests([[6]], temperature=1.0, num_completions=num_draws, max_tokens=1)
    turns = [tokens(engine.generate([replace(request, prompt_ids=[6] * length)]))[0] for length in (1, 2, 3)]
    with torch.no_grad():
        logits = [references["llama"](torch.tensor([[6] * length])).logits[0, -1].double() for length in (1, 3)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    expected = logits[0].softmax(-1).square().sum().item()
    assert expected < 0.5
    for one, other in combinations(turns, 2):
        share = sum(a == b for a, b in zip(one, other, strict=True)) / num_draws
        assert abs(share - expected) < 5 * (expected * (1 - expected) / num_draws) ** 0.5


def test_own_stop_tokens_end_a_completion_and_stay_in_it(open_engine):
    prompt_ids = prompts(6)
    plain = [group[0] for group in open_engine("llama").generate(requests(prompt_ids))]
    common = plain[0].token_ids[3]
    stopping = open_engine("llama", stop_token_ids=[common]).generate(requests(prompt_ids))
    for found, expected in zip(stopping, plain, strict=True):
        ids = expected.token_ids
        assert found[0].token_ids == (ids[: ids.index(common) + 1] if common in ids else ids)
        assert found[0].finish_reason == ("stop" if common in ids else expected.finish_reason)


def test_bad_tokens_are_never_drawn(not_in_a_server, open_engine, references):
    prompt_ids = prompts(6)
    plain = tokens(open_engine("llama").generate(requests(prompt_ids)))
    bad = plain[0][0][3]
    engine = open_engine("llama", bad_token_ids=[bad])
    found = engine.generate([*requests(prompt_ids), *requests(prompt_ids, temperature=1.0, num_completions=4)])
    assert bad not in {token for group in tokens(found) for ids in group for token in ids}
    assert tokens(found)[:6] != plain
    for ids, group in zip([*prompt_ids, *prompt_ids], found, strict=True):
        expected = logprobs_by_transformers(references["llama"], ids, group[0].token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(group[0].logprobs).double(), expected, atol=2e-5, rtol=0)


def test_trap_33_a_stop_or_bad_token_outside_the_vocabulary_is_refused(open_engine):
    for token in (9999, 10**20):
        with pytest.raises(ConfigError, match=f"have {token}, but the model's vocabulary begins at 0 and ends at 260"):
            open_engine("llama", bad_token_ids=[token])


def test_a_request_that_cannot_be_answered_is_refused_by_its_name_and_the_next_one_is_answered(open_engine, kind):
    engine, (request,) = open_engine("llama"), requests(prompts(1))
    before = tokens(engine.generate([request]))
    vocabulary = "but the model's vocabulary begins at 0 and ends at 260"
    for fault, reason in (
        ({"prompt_ids": []}, "its prompt has no token; give it at least one"),
        ({"max_tokens": 0}, "max_tokens=0; a completion has at least 1"),
        ({"prompt_ids": [5, 261]}, f"token 1 of its prompt is 261, {vocabulary}"),
        ({"prompt_ids": [-1, 5]}, f"token 0 of its prompt is -1, {vocabulary}"),
        ({"prompt_ids": [5] * 300, "max_tokens": 21}, "a prompt of 300 tokens .* are 321, more than the 320 of"),
        ({"num_completions": -1}, "num_completions=-1; give 0 or more"),
        ({"temperature": 1e-7}, "temperature=1e-07; give 1e-06 to"),
        ({"temperature": float("nan")}, "temperature=nan; give 1e-06 to"),
        ({"top_p": 0.0}, r"top_p=0\.0; give more than 0"),
        ({"stop": [""]}, r"stop=\[''\]; every text holds an empty string"),
    ):
        with pytest.raises(DataError, match=f"^request row 9: {reason}"):
            engine.generate([request, replace(request, uid="row 9", **fault)])
    for sequence, reason in (
        ([], "it has no token"),
        ([5, 261], f"token 1 of it is 261, {vocabulary}"),
        ([5] * 321, "its tokens are 321, more than the 3(20|19) of"),  # vLLM needs room for one more
    ):
        with pytest.raises(DataError, match=f"^sequence 1 to score: {reason}"):
            engine.logprobs([[5, 6], sequence])
    longest = 313 if kind == "sglang" else 319  # SGLang keeps a few tokens free
    assert [len(scores) for scores in engine.logprobs([[5] * longest])] == [longest - 1]
    assert tokens(engine.generate([request])) == before


def test_a_completion_ends_where_its_text_holds_a_stop_string_which_it_keeps(open_engine, tokenizer):
    prompt_ids = prompts(6)
    engine = open_engine("llama", has_stop_strings=True)
    plain = [group[0].token_ids for group in engine.generate(requests(prompt_ids))]
    # Half a character is no text yet, and engines may wait for its other half: a stop string of whole ones.
    stop = next(char for char in tokenizer.decode(plain[1])[1:] if char.isascii())
    stopped = engine.generate(requests(prompt_ids, stop=[stop]))
    assert stopped[1][0].finish_reason == "stop"
    assert len(stopped[1][0].token_ids) < len(plain[1])
    for found, ids in zip(stopped, plain, strict=True):
        cut = next((n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n])), len(ids))
        assert found[0].token_ids == ids[:cut]


def test_what_is_interrupted_goes_on_as_if_nothing_had_been(not_in_a_server, open_engine):
    """12 completions in 8 rows: at an interruption some have ended, some go on, some have not begun."""
    engine, wanted = open_engine("llama"), requests(prompts(6), num_completions=2, max_tokens=60)
    wanted[2] = replace(wanted[2], max_tokens=3)
    told: list[int] = []
    whole = engine.generate(wanted, on_finished=told.append)
    found, num_parts = generated_in_pieces(engine, wanted)
    assert num_parts > 2
    assert tokens(found) == tokens(whole)
    for one, other in zip((c for group in found for c in group), (c for group in whole for c in group), strict=True):
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.token_versions is None
    at_once: list[int] = []
    untouched = engine.generate(wanted, on_finished=at_once.append, is_interrupted=lambda: True)
    assert "interrupted" in {completion.finish_reason for group in untouched for completion in group}
    assert len(at_once) < len(told) == len(wanted)
    assert tokens(engine.generate(wanted[2:3])) == tokens(whole[2:3])  # nothing is left of what was interrupted


def test_a_stop_string_of_the_prompt_ends_nothing_that_goes_on_inside_a_character(
    not_in_a_server, open_engine, tokenizer
):
    """vLLM takes the prompt's text for new where the interruption has cut a character in two."""
    engine, stop = open_engine("llama", has_stop_strings=True), "=?"
    prompt_ids = [tokenizer.encode(f"{n}{stop} ", add_special_tokens=False) for n in range(8)]
    plain = [group[0].token_ids for group in engine.generate(requests(prompt_ids))]
    assert not any(stop in tokenizer.decode(ids) for ids in plain)
    begun = [
        (prompt, ids, place)
        for prompt, ids in zip(prompt_ids, plain, strict=True)
        for place in range(1, len(ids))
        if tokenizer.decode(ids[:place]).endswith("\N{REPLACEMENT CHARACTER}")
    ]
    assert begun
    for prompt, ids, place in begun:
        (request,) = requests([prompt], stop=[stop])
        going_on = replace(request, partial_token_ids=ids[:place], max_tokens=len(ids) - place)
        ((found,),) = engine.generate([going_on])
        assert (ids[:place] + found.token_ids, found.finish_reason) == (ids, "length")


def test_a_stop_string_that_begins_before_an_interruption_ends_what_goes_on(not_in_a_server, open_engine, tokenizer):
    prompt_ids, engine = prompts(8), open_engine("llama", has_stop_strings=True)
    plain = [group[0].token_ids for group in engine.generate(requests(prompt_ids))]
    row, start = next(
        (row, start)
        for row, ids in enumerate(plain)
        for start in range(3, len(ids) - 4)
        if len(text := tokenizer.decode(ids[start : start + 3])) == 3 and text.isascii()
    )
    stop = tokenizer.decode(plain[row][start : start + 3])
    (request,) = requests([prompt_ids[row]], stop=["never there", stop])
    for begun in (start + 1, start + 2, start - 1):
        ids = plain[row][:begun]
        ((found,),) = engine.generate([replace(request, partial_token_ids=ids, max_tokens=12 - begun)])
        assert (ids + found.token_ids, found.finish_reason) == (plain[row][: start + 3], "stop")
        assert len(found.logprobs) == len(found.token_ids)
