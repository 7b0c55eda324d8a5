import shutil
import sys
from pathlib import Path

import pytest

from shardwise.config import ConfigError
from shardwise.rewards.user_code import MAX_MESSAGE_CHARS, describe_error, load_function, one_line, source_file


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_load_function_from_a_file_relative_to_the_working_directory(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "neighbour.py").write_text("VALUE = 0.25\n")
    (tmp_path / "inner" / "rules.py").write_text("from neighbour import VALUE\ndef compute_score(**_): return VALUE\n")
    assert load_function("inner/rules.py:compute_score")() == 0.25


@pytest.fixture
def helpers():
    yield
    sys.modules.pop("own_helpers", None)


def test_a_file_whose_neighbour_has_the_name_of_another_files_is_refused(tmp_path, helpers):
    """Python would take the first for both."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_helpers.py").write_text(f"VALUE = '{name}'\n")
        (tmp_path / name / "rules.py").write_text("def f():\n    from own_helpers import VALUE\n    return VALUE\n")
    assert load_function("one/rules.py:f")() == "one"
    told = (
        rf"two/rules\.py:f: rules\.py imports own_helpers, and Python takes {tmp_path}/one/own_helpers\.py for it, not "
    )
    with pytest.raises(ConfigError, match=told + rf"{tmp_path}/two/own_helpers\.py beside it; rename one of the two$"):
        load_function("two/rules.py:f")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert load_function("copy/rules.py:f")() == "one"
    (tmp_path / "two" / "rules.py").write_text("import json, os.path\ndef f(): return 2\n")
    (tmp_path / "two" / "json.py").write_text("")
    assert load_function("two/rules.py:f")() == 2


def test_a_file_whose_neighbour_stands_in_the_working_directory_too_is_refused(tmp_path, helpers, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "inner").mkdir()
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / "own_helpers.py").write_text(f"VALUE = {len(folder.parts)}\n")
    (tmp_path / "inner" / "rules.py").write_text("import own_helpers as h\ndef f(): return h.VALUE\n")
    with pytest.raises(ConfigError, match=rf"imports own_helpers, and Python takes {tmp_path}/own_helpers\.py for it"):
        load_function("inner/rules.py:f")


def test_load_function_from_a_module():
    assert load_function("math:sqrt")(9.0) == 3.0


def test_load_function_of_a_file_named_like_a_standard_module_leaves_that_module_alone(tmp_path):
    import json

    (tmp_path / "json.py").write_text("def compute_score(**_): return 1\n")
    load_function("json.py:compute_score")
    assert sys.modules["json"] is json


def test_the_file_of_a_function_is_found_without_running_it(tmp_path):
    import json.decoder

    (tmp_path / "raises.py").write_text("raise RuntimeError\n")
    assert source_file("raises.py:f") == Path("raises.py")
    assert source_file("json.decoder:JSONDecoder") == Path(json.decoder.__file__)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("raise RuntimeError\n")
    sys.path.insert(0, str(tmp_path))
    for nowhere in ("missing.py:f", "no_such_package.rules:f", "broken.rules:f", "sys:exit", "rules", ":f"):
        assert source_file(nowhere) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("compute_score", "reward.functions='compute_score' is not of the form path/to/file.py:name"),
        ("rules.py:", "is not of the form"),
        (":compute_score", "is not of the form"),
        ("missing.py:compute_score", "there is no file missing.py in "),
        ("folder/rules:compute_score", "there is no file folder/rules in "),
        ("no_such_package.rules:f", "importing no_such_package.rules failed: ModuleNotFoundError: No module named"),
        ("rules.py:compute_scor", "rules.py has no 'compute_scor'; did you mean compute_score?"),
        ("rules.py:zzz", "rules.py has no 'zzz'; define it there or name one of compute_score"),
        ("rules.py:CONSTANT", "CONSTANT is a int, expected compute_score("),
        ("raises.py:f", "importing raises.py failed: ZeroDivisionError: division by zero (raises.py line 2)"),
        ("broken.py:f", "importing broken.py failed: SyntaxError: "),
        ("exits.py:f", "importing exits.py failed: SystemExit: 3"),
        ("notes.txt/:f", "there is no file"),
    ],
)
def test_load_function_bad_spec_is_a_config_error_that_says_why(tmp_path, spec, message):
    (tmp_path / "rules.py").write_text("CONSTANT = 3\ndef compute_score(**_): return 1\n")
    (tmp_path / "raises.py").write_text("x = 0\ny = 1 / x\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError) as caught:
        load_function(spec)
    assert message in str(caught.value)
    assert "reward.functions=" in str(caught.value)


def test_describe_error_names_the_last_user_line_even_when_a_library_raised(tmp_path):
    (tmp_path / "parses.py").write_text("import json\ndef f(**_):\n    return json.loads('{')\n")
    with pytest.raises(ValueError, match="Expecting") as caught:
        load_function("parses.py:f")()
    assert describe_error(caught.value).startswith("JSONDecodeError: Expecting property name")
    assert "(parses.py line 3)" in describe_error(caught.value)


def test_describe_error_names_the_line_of_an_error_without_words(tmp_path):
    text = "class Mute(LookupError):\n    def __str__(self): raise ValueError\ndef f(**_):\n    raise Mute\n"
    (tmp_path / "mute.py").write_text(text)
    with pytest.raises(LookupError) as caught:
        load_function("mute.py:f")()
    assert describe_error(caught.value) == "Mute: (its __str__ raised ValueError) (mute.py line 4)"


def test_one_line_is_one_line_and_bounded():
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("x" * 10_000_000)) == MAX_MESSAGE_CHARS + 3


def test_half_a_surrogate_pair_in_what_is_raised_reaches_no_file():
    assert describe_error(ValueError("bad \ud800 x")) == "ValueError: bad ? x"
