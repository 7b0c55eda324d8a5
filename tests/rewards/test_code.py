import pytest

from shardwise.config import ConfigError, RewardConfig
from shardwise.rewards import RewardJob, Rewards
from shardwise.rewards.code import last_block, read_tests, run_python_tests


def fenced(program, language="python"):
    return f"So:\n```{language}\n{program}\n```\nThat is it."


def run(solution, truth, **parameters):
    return run_python_tests("", solution, truth, {}, **{"timeout_seconds": 20, **parameters})


ADD = fenced("def add(a, b):\n    return a + b")
WRONG = fenced("def add(a, b):\n    return a + b if a else 7")
TESTS = ["assert add(2, 3) == 5", "assert add(0, 1) == 1", "x = add(1, 1)\nassert x == 2"]


def test_asserts_are_counted_one_by_one():
    assert run(ADD, TESTS) == {"score": 1.0, "passed": 1.0, "runs": 1.0}
    assert run(WRONG, TESTS) == {"score": 0.0, "passed": pytest.approx(2 / 3), "runs": 1.0}
    assert run(WRONG, TESTS, partial=True)["score"] == pytest.approx(2 / 3)
    assert run(ADD, "\n".join(TESTS))["score"] == 1.0


def test_to_asserts_the_program_is_a_module_that_was_imported():
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pickle\n@dataclass\nclass A:\n"
        "    x: int\n\ndef f(x):\n    return pickle.loads(pickle.dumps(A(x))).x + 1\n\n"
        "if __name__ == '__main__':\n    print(f(int(input())))"
    )
    found = run_python_tests(
        "", f"```python\n{program}\n```", ["import math\ny = 3", "assert f(y) == 4 and math.pi > 3"]
    )
    assert found == {"score": 1.0, "passed": 1.0, "runs": 1.0}
    found = run_python_tests("", f"```python\n{program}\n```", [{"stdin": "3", "stdout": "4"}])
    assert found["score"] == 1.0


def test_inputs_and_outputs_are_runs_of_their_own():
    program = fenced("n = int(input())\nprint(sum(int(x) for x in input().split()[:n]))\nexit()")
    pairs = [{"stdin": "2\n3 4\n", "stdout": "7"}, {"stdin": "1\n5 9\n", "stdout": "5 \n\n"}]
    assert run(program, pairs) == {"score": 1.0, "passed": 1.0, "runs": 1.0}
    wrong = [pairs[0], {"stdin": "1\n5\n", "stdout": "6"}, {"stdin": "x", "stdout": ""}]
    assert run(program, wrong, partial=True) == {
        "score": pytest.approx(1 / 3),
        "passed": pytest.approx(1 / 3),
        "runs": 0.0,
    }


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "def add(a, b):\n    return 0",
        "def add(:",
        "'''",
        "print('ran')\nfor n in range(9): print(n)",
        "while True: pass",
    ],
    ids=["exits", "exits hard", "wrong", "syntax", "open string", "prints", "never ends"],
)
def test_a_program_that_does_not_pass_scores_nothing(program):
    assert run(fenced(program), TESTS, timeout_seconds=2)["score"] == 0.0


def test_no_block_is_no_program_and_the_last_one_counts():
    assert run("def add(a, b): return a + b", TESTS) == {"score": 0.0, "passed": 0.0, "runs": 0.0}
    assert last_block(fenced("a = 1") + fenced("b = 2", "py") + "\n```json\n{}\n```\n") == "b = 2\n"
    assert last_block("```\nx\n```") == "x\n"
    assert last_block("``` x ```") is None
    assert last_block("```json\n{}\n```\nso\n```python\na = 1\n```\n```python\ncut off") == "a = 1\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na = 1\n```\nOutput:\n```\n7\n```", "a = 1\n"),
        ("```\na = 1\n```\n```js\nlet a\n```", "a = 1\n"),
        ("```js\nlet a\n```", None),
        ("``` python\na = 1\n```", "a = 1\n"),
        ('```Python3 title="x.py"\na = 1\n```', "a = 1\n"),
        ("```pycon\n>>> a\n```", None),
        ("~~~py\n```\na = 1\n~~~", "```\na = 1\n"),
        ("~~~ py `x`\na = 1\n~~~~", "a = 1\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("```python\na = 1\n````  ", "a = 1\n"),
        ("```python\na = 1\n~~~", None),
        ("```python\na = 1\n``` x\n```", "a = 1\n``` x\n"),
        ('```python\n"""\n    ```\n    """\n```', '"""\n    ```\n    """\n'),
    ],
)
def test_fences_are_those_of_commonmark(text, program):
    assert last_block(text) == program
    assert last_block(text.replace("\n", "\r\n")) == program


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("1. So:\n   ```python\n   if a:\n       b\n\n  c\n   ```", "if a:\n    b\n\nc\n"),
        ("- ```python\n  if a:\n      b\n  ```", "if a:\n    b\n"),
        ("10) * ```py\n      if a:\n          b\n      ```", "if a:\n    b\n"),
        ("\t```python\n\tif a:\n\t\tb\n\t```", "if a:\n\tb\n"),
        ("  ```python\n\ta\n```", "  a\n"),  # two of the tab's four columns
        ("```python\nif a:\n\tb\n```", "if a:\n\tb\n"),
    ],
)
def test_a_block_loses_the_indentation_of_its_fence(text, program):
    assert last_block(text) == program


@pytest.mark.parametrize("char", ["\u2028", "\x0c", "\x85", "\x1c", "\x0b"])
def test_string_literals_keep_characters_that_end_lines_elsewhere(char):
    program = f"a = '1{char}2'\n"
    assert last_block(f"```python\n{program}```") == program


def test_a_program_in_a_list_runs_and_what_it_printed_does_not():
    solution = (
        "1. So:\n   ``` python\n   def add(a, b):\n       return a + b\n   ```\n   Output:\n   ```\n   5\n   ```\n"
    )
    assert run(solution, TESTS) == {"score": 1.0, "passed": 1.0, "runs": 1.0}


def test_null_is_no_text():
    assert read_tests([{"stdin": None, "stdout": 7}, {"stdin": "1", "stdout": None}]) == ([], [("", "7"), ("1", "")])


@pytest.mark.parametrize("truth", ["", [], None, 5, ["a", {"stdin": "", "stdout": ""}], [{"stdin": ""}]])
def test_ground_truth_without_tests_is_an_error_not_a_zero(truth):
    with pytest.raises(ValueError, match="ground_truth holds no tests"):
        read_tests(truth)


def test_a_machine_without_a_sandbox_stops_the_run_whatever_the_policy(tmp_path, monkeypatch):
    """In a pool: the function finds out with its first program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(
        "from shardwise.config import ConfigError\n"
        "from shardwise.rewards import sandbox_child, sandbox, code\n"
        "def refuse(*_, **__):\n"
        "    raise ConfigError('programs cannot be run in a sandbox here')\n"
        "code.run_python = refuse\n"
        "run = code.run_python_tests\n"
    )
    config = RewardConfig(functions="rules.py:run", num_workers=1, on_failure="value", max_failure_rate=1)
    with Rewards(config) as rewards, pytest.raises(ConfigError, match="programs cannot be run in a sandbox here"):
        rewards.score([RewardJob(uid="a", data_source="", solution_str=ADD, ground_truth=TESTS)])


def test_a_pool_runs_programs():
    entry = {"function": "shardwise.rewards.code:run_python_tests", "parameters": {"partial": True}}
    jobs = [RewardJob(uid=s, data_source="", solution_str=s, ground_truth=TESTS) for s in (ADD, WRONG, "none")]
    with Rewards(RewardConfig(functions=entry, num_workers=2)) as rewards:
        results = rewards.score(jobs)
    assert [result.score for result in results] == [1.0, pytest.approx(2 / 3), 0.0]
