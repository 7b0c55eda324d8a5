import pytest

from shardwise.config import ConfigError, DataError, ModelError, RewardError, TrainingError, UserError, error_text


@pytest.mark.parametrize("kind", [ConfigError, DataError, ModelError, RewardError, TrainingError])
def test_every_error_is_a_user_error_of_its_own_and_no_value_error(kind):
    """A ValueError inside a validator would be swallowed by pydantic, and one in a recipe taken for a bug."""
    error = kind("what was given")
    assert isinstance(error, UserError)
    assert not isinstance(error, ValueError)
    assert str(error) == "what was given"
    others = {ConfigError, DataError, ModelError, RewardError, TrainingError} - {kind}
    assert not isinstance(error, tuple(others))


def test_an_exception_that_cannot_say_what_it_is_is_told_all_the_same():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    assert error_text(Mute("a")) == "(its __str__ raised ValueError)"
    assert error_text(KeyError("a")) == "'a'"
