import time

import pytest
import yaml

from shardwise.config import ConfigError
from shardwise.config.yaml_values import read_yaml, value_of, yaml_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-1_000", -1000),
        ("0x1F", 31),
        ("0", 0),
        ("1e-6", 1e-6),
        ("-1.5E+3", -1500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("010", "010"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01 10:00:00", "2024-01-01 10:00:00"),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
        ("true", True),
        ("null", None),
        ("[1, a]", [1, "a"]),
    ],
)
def test_scalars_are_those_of_yaml_1_2_and_written_so_that_they_are_read_back(tmp_path, text, value):
    """YAML 1.1 reads 010 as 8, 1:30 as 90 and days as dates."""
    read = value_of(text)
    assert read == value
    assert type(read) is type(value)
    (tmp_path / "tree.yaml").write_text(yaml_of({"value": value, "text": text}), encoding="utf-8")
    again = read_yaml(tmp_path / "tree.yaml")
    assert again == {"value": value, "text": text}
    assert [type(part) for part in again.values()] == [type(value), str]


def test_numbers_beyond_the_finite_are_read():
    assert value_of("-.inf") == float("-inf")
    assert value_of(".nan") != value_of(".nan")


def test_a_key_may_replace_one_that_is_merged():
    text = "a: &a {x: 1, y: 2}\nbase: {sub: &b {<<: *a, x: 3}}\nother: {<<: *b}\n"
    assert value_of(text)["base"] == {"sub": {"x": 3, "y": 2}}


def test_a_key_that_is_given_twice_is_refused(tmp_path):
    """PyYAML keeps the last, and a whole group of keys would be lost."""
    path = tmp_path / "config.yaml"
    path.write_text("a: &all\n  b: 1\nc:\n  <<: *all\n  b: 2\na:\n  d: 3\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert str(error.value) == f"{path} is not valid YAML: the key a is given twice, in line 1 and in line 6"


def bomb(num_levels):
    """Each level has the one before ten times."""
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, num_levels)]
    return "\n".join(["l0: &l0 [1]", *levels])


def num_values(num_levels):
    """Of a bomb, keys and the group of them among them: a level is a list of ten of the one before."""
    sizes = [2]
    while len(sizes) < num_levels:
        sizes.append(1 + 10 * sizes[-1])
    return 1 + num_levels + sum(sizes)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: &m {path: *m}", "what the anchor in line 1 names contains itself; write it out"),
        ("a: 1\nb: &b\n- 2\n- [*b]", "what the anchor in line 2 names contains itself; write it out"),
        ("a: &a {<<: *a}", "what the anchor in line 1 names contains itself; write it out"),
        (f"a: {'[' * 100}{']' * 100}", "it is nested more than 100 levels deep"),
        (f"a: {'[' * 5000}{']' * 5000}", "it is nested more than 100 levels deep"),
        (f"a: {'{b: ' * 5000}{'}' * 5000}", "it is nested more than 100 levels deep"),
        (bomb(12), f"its aliases stand for {num_values(12):,} values, more than 100,000; write out what is meant"),
        (bomb(12).replace("[*", "{<<: [*").replace("]", "]}").replace("[1]}", "{a: 1}"), "its aliases stand for "),
    ],
)
def test_yaml_without_end_is_refused_by_what_is_wrong(tmp_path, text, problem):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert time.monotonic() - began < 10
    assert str(error.value).startswith(f"{path} is not valid YAML: {problem}")
    with pytest.raises(yaml.YAMLError):
        value_of(text)


def test_what_is_written_out_may_be_long_and_aliases_may_stand_for_much():
    names = value_of(bomb(5))
    assert names["l4"][9][9][9][9] == [1]
    deep = value_of("[" * 100 + "]" * 100)
    for _ in range(99):
        (deep,) = deep
    assert deep == []
    assert value_of(f"[{', '.join(['7'] * 100_001)}]") == [7] * 100_001
