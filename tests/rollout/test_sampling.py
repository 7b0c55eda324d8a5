import hashlib
import math

import pytest
import torch

from shardwise.rollout.sampling import Settings, sample, stream_key, uniforms
from shardwise.types import GenerateRequest

MASK = 2**64 - 1


def settings(count, **options):
    """The same for every row."""
    options = {"max_tokens": 1, "temperature": 1.0, **options}
    return Settings.of([GenerateRequest(uid="a", prompt_ids=[1], **options)] * count, torch.device("cpu"))


def split_mix(key: int, position: int) -> float:
    """SplitMix64 as published, on Python's unbounded integers."""
    state = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return ((state ^ (state >> 31)) >> 11) / 2**53


def test_uniforms_are_split_mix_64():
    keys = torch.tensor([0, 1, -1, 2**62, -(2**63), 2**63 - 1, stream_key(3, "row", 5)])
    positions = torch.tensor([0, 1, 7, 100_000, 2, 2**31, 12])
    expected = [split_mix(key, position) for key, position in zip(keys.tolist(), positions.tolist(), strict=True)]
    assert uniforms(keys, positions).tolist() == expected


def test_first_output_of_split_mix_matches_the_published_value():
    """The reference implementation seeded with 0 gives 0xE220A8397B1DCDAF first."""
    assert float(uniforms(torch.tensor([0]), torch.tensor([0]))) == (0xE220A8397B1DCDAF >> 11) / 2**53


@pytest.mark.parametrize("along", ["keys", "positions"])
def test_uniforms_are_uniform_and_uncorrelated(along):
    count = 100_000
    if along == "keys":
        keys, positions = torch.tensor([stream_key(0, "row", i) for i in range(count)]), torch.full((count,), 9)
    else:
        keys, positions = torch.full((count,), stream_key(0, "row", 0)), torch.arange(count)
    draws = uniforms(keys, positions)
    assert float(draws.min()) >= 0.0
    assert float(draws.max()) < 1.0
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is the 99.9 % quantile.
    ranks = torch.arange(1, count + 1, dtype=torch.float64) / count
    assert float((draws.sort().values - ranks).abs().max()) < 1.95 / math.sqrt(count)
    assert abs(float(torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1])) < 4 / math.sqrt(count)


def test_stream_key_is_a_hash_of_seed_uid_and_index():
    digest = hashlib.blake2b(b"7/a/b.jsonl line 3/2", digest_size=8).digest()
    assert stream_key(7, "a/b.jsonl line 3", 2) == int.from_bytes(digest, "little", signed=True)
    assert len({stream_key(seed, uid, index) for seed in (0, 1) for uid in "ab" for index in range(50)}) == 200


def test_sample_inverts_the_cumulative_distribution():
    """Probabilities 0.1, 0.2, 0.3, 0.4 have the borders 0.1, 0.3, 0.6."""
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    draws = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, 0.9999], dtype=torch.float64)
    tokens, logprobs = sample(probabilities.log().repeat(8, 1), settings(8), draws)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax_at_the_temperature(temperature):
    count = 40_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    draws = uniforms(torch.arange(count) * 977, torch.zeros(count, dtype=torch.int64))
    tokens, logprobs = sample(logits.repeat(count, 1), settings(count, temperature=temperature), draws)
    expected = torch.softmax(logits.double() / temperature, dim=-1)
    observed = tokens.bincount(minlength=5).double() / count
    bound = 4 * (expected * (1 - expected) / count).sqrt()
    assert ((observed - expected).abs() < bound).all(), (observed, expected)
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], atol=1e-6, rtol=0)


def test_temperature_zero_takes_the_likeliest_and_scores_it_at_one():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 1.0, 4.9]])
    expected = torch.log_softmax(logits, dim=-1)
    tokens, logprobs = sample(
        logits.clone(), settings(2, temperature=0.0), torch.tensor([0.999, 0.999], dtype=torch.float64)
    )
    assert tokens.tolist() == [1, 0]
    assert torch.equal(logprobs, expected[torch.arange(2), tokens])


@pytest.mark.parametrize("temperature", [0.0, 1e-46, 1e-6])
def test_what_is_zero_in_float32_is_greedy_for_tokens_and_logprobs_alike(temperature):
    """Rows that `sample` would score at temperature 1 are those whose likeliest token it takes."""
    chosen = settings(3, temperature=temperature)
    assert chosen.any_greedy == bool((chosen.temperatures == 0).any()) == (temperature < 1e-45)
    tokens, _ = sample(torch.tensor([[1.0, 1.5, 1.2]]).repeat(3, 1), chosen, torch.tensor([0.01, 0.5, 0.99]).double())
    assert tokens.tolist() == [1, 1, 1]


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-53])
def test_extreme_draws_never_take_an_impossible_token(draw):
    """The largest draw rounds to 1 in float32, where the cumulative distribution has ended already."""
    impossible = -1e4
    logits = torch.tensor([[impossible, 0.0, impossible, 1.0, impossible, impossible]])
    tokens, logprobs = sample(logits, settings(1), torch.tensor([draw], dtype=torch.float64))
    assert tokens.tolist() == [1 if draw == 0.0 else 3]
    assert float(logprobs) > -2.0


def allowed_by_loops(probabilities, top_k, top_p, min_p):
    """Tokens that may be drawn: the k likeliest of those near the likeliest, then those that hold top_p of them."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    order = [token for token in order if probabilities[token] >= min_p * probabilities[order[0]]]
    order = order[: top_k or None]
    total, held, kept = sum(probabilities[token] for token in order), 0.0, []
    for token in order:
        if held >= top_p * total and kept:
            break
        kept.append(token)
        held += probabilities[token]
    return set(kept)


RESTRICTIONS = [
    (3, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.2),
    (4, 0.8, 0.05),
    (1, 1.0, 0.0),
    (0, 1e-6, 0.0),
    (99, 0.9, 0.0),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), RESTRICTIONS)
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_restricted_draws_follow_what_is_left_and_keep_the_policys_logprobs(temperature, top_k, top_p, min_p):
    count = 20_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(top_k)) * 2
    policy = torch.softmax(logits.double() / temperature, dim=-1)
    allowed = allowed_by_loops(policy.tolist(), top_k, top_p, min_p)
    chosen = settings(count, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    draws = uniforms(torch.arange(count) * 977, torch.zeros(count, dtype=torch.int64))
    tokens, logprobs = sample(logits.repeat(count, 1), chosen, draws)
    assert set(tokens.tolist()) <= allowed
    expected = torch.tensor([float(policy[token]) if token in allowed else 0.0 for token in range(12)]).double()
    expected /= expected.sum()
    observed = tokens.bincount(minlength=12).double() / count
    assert ((observed - expected).abs() <= 4.5 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()
    torch.testing.assert_close(logprobs.double(), policy.log()[tokens], atol=1e-5, rtol=0)


def test_every_row_has_restrictions_of_its_own_and_rows_without_any_draw_as_before():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    draws = torch.tensor([0.9999, 0.9999, 0.5, 0.9999, 0.2], dtype=torch.float64)
    rows = [
        GenerateRequest(uid="a", prompt_ids=[1], max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
        for temperature, top_k, top_p in [(1.0, 2, 1.0), (1.0, 0, 1.0), (0.0, 0, 0.1), (2.0, 0, 0.5), (1.0, 0, 1.0)]
    ]
    mixed = Settings.of(rows, torch.device("cpu"))
    tokens, logprobs = sample(logits.clone(), mixed, draws)
    for row in range(5):
        alone = sample(logits[row : row + 1].clone(), mixed[row : row + 1], draws[row : row + 1])
        assert (tokens[row], logprobs[row]) == (alone[0][0], alone[1][0])
    plain, _ = sample(logits.clone(), mixed, draws)
    assert [int(tokens[row]) == int(plain[row]) for row in (1, 2, 4)] == [True] * 3
    assert int(tokens[0]) in logits[0].topk(2).indices


def test_a_row_without_limits_draws_the_whole_tail_beside_rows_with_them():
    """Of 150,000 equal words and a tail of 1,000 that float32 loses in their sum; the tail has 1.5e-8 of the mass."""
    logits = torch.zeros(2, 151_000)
    logits[:, 150_000:] = -13.0
    rows = [GenerateRequest(uid="a", prompt_ids=[1], max_tokens=1, temperature=1.0, top_k=top_k) for top_k in (0, 5)]
    draws = torch.full((2,), 1 - 5e-9, dtype=torch.float64)
    mixed = Settings.of(rows, torch.device("cpu"))
    tokens, _ = sample(logits.clone(), mixed, draws)
    alone, _ = sample(logits[:1].clone(), mixed[:1], draws[:1])
    assert int(tokens[0]) == int(alone[0]) >= 150_000


def test_a_tie_at_the_border_is_drawn_as_a_whole():
    logits = torch.tensor([[0.0, 1.0, 1.0, -1.0]]).repeat(3, 1)
    draws = torch.tensor([0.0, 0.49, 0.51], dtype=torch.float64)
    tokens, _ = sample(logits, settings(3, top_k=1), draws)
    assert tokens.tolist() == [1, 1, 2]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.3}])
def test_banned_tokens_are_never_drawn_and_change_no_logprob(options):
    logits = torch.tensor([[5.0, 4.0, 0.0, -1.0]]).repeat(50, 1)
    expected = torch.log_softmax(logits[0] / (options.get("temperature") or 1.0), dim=-1)
    draws = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    banned = torch.tensor([0, 3])
    tokens, logprobs = sample(logits.clone(), settings(50, **options), draws, banned=banned)
    assert set(tokens.tolist()) == ({1} if options else {1, 2})
    torch.testing.assert_close(logprobs, expected[tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.9}])
def test_what_a_banned_token_leaves_is_drawn_even_where_its_probability_rounds_to_nothing(options):
    logits = torch.tensor([[300.0, 0.0, math.log(3.0)]]).repeat(1000, 1)
    draws = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens, logprobs = sample(logits.clone(), settings(1000, **options), draws, banned=torch.tensor([0]))
    assert tokens.bincount(minlength=3).tolist() == ([0, 0, 1000] if "temperature" in options else [0, 250, 750])
    torch.testing.assert_close(logprobs, logits[0, tokens] - 300.0)


@pytest.mark.parametrize("num_words", [127, 128, 129, 1000])
def test_draws_and_the_likeliest_agree_with_whole_rows_at_every_size_of_vocabulary(num_words):
    """Against the inverse of a float64 cumulative sum over the row, on draws away from its borders."""
    logits = torch.randn(300, num_words, generator=torch.Generator().manual_seed(num_words)) * 2
    probabilities = torch.softmax(logits.double(), dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    draws = uniforms(torch.arange(300) * 977, torch.zeros(300, dtype=torch.int64))
    clear = (cumulative - draws[:, None]).abs().amin(dim=-1) > 1e-6
    assert int(clear.sum()) > 280
    expected = (cumulative <= draws[:, None]).sum(dim=-1)
    tokens, logprobs = sample(logits.clone(), settings(300), draws)
    assert torch.equal(tokens[clear], expected[clear])
    found = probabilities.log().gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), found, atol=1e-6, rtol=0)
    assert torch.equal(sample(logits.clone(), settings(300, temperature=0.0), draws)[0], logits.argmax(dim=-1))


def test_logits_that_are_no_numbers_give_a_token_and_a_logprob_that_is_none():
    logits = torch.full((2, 300), torch.nan)
    logits[1] = 0.0
    tokens, logprobs = sample(logits, settings(2, temperature=1.0), torch.tensor([0.9, 0.5], dtype=torch.float64))
    assert 0 <= tokens[0] < 300
    assert logprobs[0].isnan()
    assert logprobs[1].isfinite()
