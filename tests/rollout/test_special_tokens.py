import pytest
from transformers import GenerationConfig, Qwen3Config

from shardwise.config import ConfigError, ModelError
from shardwise.rollout.special_tokens import require_ends, require_words


def test_the_generation_config_goes_first_and_may_name_several():
    config = Qwen3Config(eos_token_id=3)
    assert require_ends(None, config) == [3]
    assert require_ends(GenerationConfig(), config) == [3]
    assert require_ends(GenerationConfig(eos_token_id=5), config) == [5]
    assert require_ends(GenerationConfig(eos_token_id=[5, 7]), config) == [5, 7]


def test_a_model_without_one_is_refused():
    with pytest.raises(ModelError, match=r"qwen3: neither .* has an eos_token_id, so no completion would ever end"):
        require_ends(GenerationConfig(), Qwen3Config(eos_token_id=None))


def test_trap_33_words_outside_the_vocabulary_are_refused():
    require_words([0], [9], 10)
    for stop, bad, wrong in (([0, 10, 11], [], 10), ([], [3, 10], 10), ([-1], [], -1), ([], [-2], -2)):
        with pytest.raises(ConfigError, match=f"have {wrong}, but the model's vocabulary begins at 0 and ends at 9; "):
            require_words(stop, bad, 10)


def test_a_stop_token_that_never_comes_is_refused():
    with pytest.raises(ConfigError, match=r"stop_token_ids and bad_token_ids both have 3, which never comes"):
        require_words([5, 3], [3, 4], 10)


def test_a_vocabulary_of_which_nothing_may_be_drawn_is_refused():
    """A draw among none of them would be of one of them."""
    require_words([], [*range(9), 3], 10)
    with pytest.raises(ConfigError, match=r"rollout\.bad_token_ids leave none of the model's 10 tokens to draw"):
        require_words([], range(10), 10)
