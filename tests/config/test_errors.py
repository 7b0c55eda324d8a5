import pytest

from shardwise.config import (
    ConfigError,
    DataError,
    ModelError,
    RewardError,
    TrainingError,
    UserError,
    as_user_error,
    error_text,
    in_one_line,
)


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


def test_what_the_system_says_of_a_path_is_the_users_to_mend_and_other_errors_stay_what_they_are(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError) as caught:
        (tmp_path / "file" / "inside").read_text()
    error = as_user_error(caught.value)
    assert isinstance(error, ConfigError)
    assert str(error) == f"{tmp_path}/file/inside: Not a directory; a part of it is a file; give a path through folders"
    with pytest.raises(FileNotFoundError) as absent:  # what should be there is looked for with words of its own
        (tmp_path / "absent").read_text()
    assert as_user_error(absent.value) is absent.value
    nameless = PermissionError(1, "Operation not permitted")  # of a call that takes no path
    assert as_user_error(nameless) is nameless


def test_what_an_error_says_is_quoted_in_one_line():
    assert in_one_line(ValueError("  no\n  such\tkey \n")) == "no such key"
