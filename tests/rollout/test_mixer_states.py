"""Models whose layers carry a state from token to token, in the embedded engine: against transformers, which reads
every sequence alone and from its beginning."""

from dataclasses import replace

import pytest
import torch
from family_checks import CPU, eager_logprobs, require_logprobs_of, sequences
from family_table import FAMILIES, save_model
from torch import nn

from shardwise.config import LoraConfig, ModelError
from shardwise.engine.files.adapters import attach_adapter
from shardwise.rollout import EmbeddedEngine
from shardwise.rollout.mixer_states import MixerStates, places_by_length
from shardwise.types import GenerateRequest

KINDS = ["qwen3_5_text", "falcon_h1", "nemotron_h", "lfm2"]
"""Linear attention in every second layer, a state space beside attention in each, one whose time steps have a least
size and layers that only feed forward, short convolutions."""
MAX_TOKENS = 7
ATOL = 5e-5
"""A state that grows token by token rounds otherwise than one of whole chunks."""


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(request.param, FAMILIES[request.param], folder)


def open_engine(folder, *, max_rows=4, **options) -> EmbeddedEngine:
    return EmbeddedEngine.from_folder(folder, dtype=torch.float32, max_rows=max_rows, device=CPU, **options)


def requests(num_completions=3, lengths=(9, 5, 1, 5)):
    return [
        GenerateRequest(
            uid=f"{i}", prompt_ids=ids.tolist(), num_completions=num_completions, max_tokens=MAX_TOKENS, temperature=1.0
        )
        for i, ids in enumerate(sequences(lengths))
    ]


def test_completions_of_a_group_go_on_from_the_state_of_its_prompt(saved):
    """Twelve completions of ragged prompts in four rows: prompts wait, rows end and move."""
    folder, model = saved
    asked = requests()
    found = open_engine(folder).generate(asked)
    assert len({tuple(completion.token_ids) for group in found for completion in group}) > 9
    for request, group in zip(asked, found, strict=True):
        for completion in group:
            require_logprobs_of(model, request, completion, atol=ATOL)


@pytest.mark.parametrize("limits", [(0.0, 0.1), (0.05, 0.5)])
@pytest.mark.parametrize("family", ["bamba", "falcon_h1"])
def test_time_steps_of_a_further_token_are_bounded_as_those_of_a_prompt(tmp_path, family, limits):
    model = save_model(family, FAMILIES[family] | {"time_step_limit": limits}, tmp_path)
    asked = requests(num_completions=1)
    for request, (completion,) in zip(asked, open_engine(tmp_path).generate(asked), strict=True):
        require_logprobs_of(model, request, completion, atol=ATOL)


def test_draws_do_not_depend_on_what_is_decoded_beside_them(saved):
    folder, _ = saved
    few, many = (open_engine(folder, max_rows=rows).generate(requests()) for rows in (2, 12))
    for one, other in zip(few, many, strict=True):
        assert [completion.token_ids for completion in one] == [completion.token_ids for completion in other]


def test_a_completion_that_was_interrupted_goes_on_from_what_it_has(saved):
    folder, model = saved
    engine = open_engine(folder)
    (request, *_) = requests(num_completions=1)
    (whole,) = engine.generate([request])[0]
    begun = replace(request, partial_token_ids=whole.token_ids[:3], max_tokens=MAX_TOKENS - 3)
    (rest,) = engine.generate([begun])[0]
    assert begun.partial_token_ids + rest.token_ids == whole.token_ids
    require_logprobs_of(model, begun, rest, atol=ATOL)


def test_logprobs_of_given_sequences(saved):
    folder, model = saved
    tokens = sequences((9, 2))
    for found, sequence in zip(open_engine(folder).logprobs([t.tolist() for t in tokens]), tokens, strict=True):
        torch.testing.assert_close(torch.tensor(found), eager_logprobs(model, sequence), atol=2e-5, rtol=0)


def test_weights_keep_their_names(saved):
    folder, model = saved
    engine = open_engine(folder)
    tied = set(model.get_expanded_tied_weights_keys())
    assert [name for name, _ in engine.served_weights()] == [name for name in model.state_dict() if name not in tied]


def test_new_weights_of_a_mixer_are_what_is_computed_with(saved):
    folder, model = saved
    engine, asked = open_engine(folder), requests(num_completions=1)
    before = engine.generate(asked)
    with torch.no_grad():
        changed = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in engine.served_weights()}
        engine.load_weights(changed.items())
        engine.commit_weights(1)
        original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(changed, strict=False)
        model.tie_weights()
        after = engine.generate(asked)
        for request, (completion,) in zip(asked, after, strict=True):
            require_logprobs_of(model, request, completion, atol=ATOL)
        model.load_state_dict(original)
    assert [group[0].logprobs for group in after] != [group[0].logprobs for group in before]


def test_an_adapter_reaches_the_projections_of_mixers(saved):
    """Alone in a sync, by peft's names; without values until one comes."""
    folder, _ = saved
    lora = LoraConfig(rank=2)
    engine = open_engine(folder, attach_adapter=lambda model: attach_adapter(model, config=lora))
    served = dict(engine.served_weights())
    others = ("self_attn", "mlp", "feed_forward")
    of_mixers = {
        name: torch.full_like(tensor, 0.1) for name, tensor in served.items() if not any(map(name.count, others))
    }
    assert of_mixers
    assert not any("_checkpoint_wrapped_module" in name for name in served)
    asked = requests(num_completions=1)
    before = engine.generate(asked)
    engine.load_weights(of_mixers.items())
    engine.commit_weights(1)
    assert [group[0].logprobs for group in engine.generate(asked)] != [group[0].logprobs for group in before]


@pytest.mark.full  # compiles a model
@pytest.mark.parametrize("family", ["qwen3_5_text", "llama4_text"])
def test_a_compiled_decode_step_gives_the_same_completions(tmp_path, family):
    """Mixers stay outside the graphs; chunks of attention are known to the kernels."""
    torch.compiler.reset()
    save_model(family, FAMILIES[family], tmp_path)
    plain, compiled = (
        open_engine(tmp_path, compile_decode=compiles).generate(requests()) for compiles in (False, True)
    )
    for group, expected in zip(compiled, plain, strict=True):
        for one, other in zip(group, expected, strict=True):
            assert one.token_ids == other.token_ids
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)


def test_a_sequence_in_which_llama_4_would_scale_queries_by_their_place_is_refused(tmp_path):
    """A decode step does not tell its layers which token it is."""
    model = save_model("llama4_text", FAMILIES["llama4_text"] | {"floor_scale": 9 + MAX_TOKENS + 1}, tmp_path)
    asked = requests()
    for request, group in zip(asked, open_engine(tmp_path).generate(asked), strict=True):
        for completion in group:
            require_logprobs_of(model, request, completion, atol=ATOL)
    with pytest.raises(ModelError, match=r"are 17 tokens, more than the 16 up to which attn_temperature_tuning"):
        open_engine(tmp_path).generate(requests(lengths=(10,)))


class Accumulator(nn.Module):
    """Sums a convolution over two tokens, and carries the sum on."""

    def __init__(self, **_options) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 2)
        self.layer_idx = 0

    def forward(self, hidden_states, cache_params=None, **_kwargs):
        tokens = hidden_states.transpose(1, 2)
        length = tokens.shape[-1]
        before = cache_params.get_recurrent_state(0)
        tokens = cache_params.update_conv_state(tokens, 0, conv_kernel_size=2)
        mixed = tokens + nn.functional.pad(tokens, (1, -1))
        mixed = mixed[..., -length:].cumsum(-1) + (0 if before is None else before)
        cache_params.update_recurrent_state(mixed[..., -1:], layer_idx=0)
        return mixed.transpose(1, 2)


def test_states_of_rows_are_kept_apart():
    """The mixer by hand: of tokens x the sums of x[t] + x[t - 1]."""
    states, mixer = MixerStates(3), Accumulator()
    tokens = torch.arange(24.0).view(2, 4, 3)
    states.begin(torch.tensor([2, 0]))
    begun = mixer(tokens, states)
    assert states.get_conv_state(0) is None
    states.go_on(1)
    token = torch.full((1, 1, 3), 5.0)
    gone_on = mixer(token, states)
    torch.testing.assert_close(begun[1], (tokens[1] + nn.functional.pad(tokens[1], (0, 0, 1, -1))).cumsum(0))
    torch.testing.assert_close(gone_on[0, 0], begun[1, -1] + token[0, 0] + tokens[1, -1])
    conv, recurrent = states.tensors()
    assert (conv.shape, recurrent.shape) == ((3, 3, 2), (3, 3, 1))
    torch.testing.assert_close(conv[2], tokens[0, -2:].T)
    torch.testing.assert_close(recurrent[2, :, 0], begun[0, -1])
    assert not any(state[1].any() for state in (conv, recurrent))


def test_prompts_of_one_length_are_read_together():
    assert places_by_length([3, 5, 3, 1]) == {3: [0, 2], 5: [1], 1: [3]}
