import pytest

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
