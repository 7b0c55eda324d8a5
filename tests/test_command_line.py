import os
import subprocess
import sys

import pytest

import shardwise
from shardwise.command_line import parse
from shardwise.config import RECIPES, key_paths
from shardwise.config.base import EXAMPLE_OVERRIDE

TRAINS = ["model.path=m", "data.train_files=t.jsonl"]
REWARD = "reward.functions=a:b"
NEEDED = {
    **dict.fromkeys(RECIPES, TRAINS),
    "distill": [*TRAINS, "teacher.model.path=t"],
    "rl": [*TRAINS, REWARD],
    "eval": ["model.path=m", "data.validation_files=v.jsonl", REWARD],
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_overrides_stand_before_and_after_options(recipe):
    found = parse([recipe, "a=1", "--nproc", "3", "b.c=[2, 3]", "-c", "x.yaml", "d=--4"])
    assert (found.command, found.overrides) == (recipe, ["a=1", "b.c=[2, 3]", "d=--4"])
    assert (found.nproc, found.config, found.dry_run) == (3, "x.yaml", False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["sft", "--config=~/a"],
        ["quickstart", "--output-dir=~/a"],
        ["generate", "~/a"],
        ["export", "~/a", "~/a"],
        ["import-checkpoint", "~/a", "~/a", "--model=~/a", "--config=~/a"],
        ["parity", "~/a"],
        ["replay", "~/a"],
    ],
)
def test_every_path_may_begin_with_the_home_folder(arguments, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    given = sum("~" in argument for argument in arguments)
    assert list(vars(parse(arguments)).values()).count("/home/ada/a") == given


@pytest.mark.parametrize("rest", [["--nprocs=2"], ["a=1", "b"], ["-x"]])
def test_what_is_no_option_and_no_override_is_refused(rest, capsys):
    with pytest.raises(SystemExit):
        parse(["sft", "a=1", "--nproc", "2", *rest])
    told = capsys.readouterr().err
    assert "shardwise sft: error: unrecognized arguments: " in told
    assert told.startswith("usage: shardwise sft [-h] [-c CONFIG]")


def test_a_second_config_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["sft", "-c", "a.yaml", "trainer.total_steps=2", "--config=b.yaml"])
    assert "-c b.yaml: there is a config already; give one file, and the other's keys as" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["generate", "export", "import-checkpoint", "parity", "replay", "schema", "quickstart"]
)
def test_the_help_of_a_command_says_what_it_does(command, capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    listed = " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        parse([command, "--help"])
    said = " ".join(capsys.readouterr().out.split()).partition(f" {command}: ")[2]
    assert len(said) > 20
    assert f"{command} {said[:20]}" in listed


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_example_of_an_override_is_one_of_the_command(recipe, capsys):
    with pytest.raises(SystemExit):
        parse([recipe, "-h"])
    assert f"e.g. {EXAMPLE_OVERRIDE}\n" in capsys.readouterr().out
    key, _, value = EXAMPLE_OVERRIDE.partition("=")
    assert key in key_paths(RECIPES[recipe])
    config = RECIPES[recipe].load(None, [*NEEDED[recipe], EXAMPLE_OVERRIDE])
    assert getattr(config.engine, key.removeprefix("engine.")) == value


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sft", "--max-restarts", "-1"], "-1 is not a number of restarts; use 0 or more"),
        (["sft", "--nproc", "0"], "0 is not a number of ranks; use 1 or more"),
        (["export", "a", "b", "--stall-timeout-seconds", "nan"], "nan is not a time; give a number of seconds above 0"),
        (["export", "a", "b", "--stall-timeout-seconds", "0"], "0 is not a time; give a number of seconds above 0"),
        (["generate", "m", "-p", os.fsdecode(b"a\xff")], "b'a\\xff' is not UTF-8"),
        (["parity", "m", "-p", os.fsdecode(b"a\xff")], "b'a\\xff' is not UTF-8"),
        (["sft", "model.path=m", os.fsdecode(b"a=\xff")], "shardwise sft: error: override b'a=\\xff' is not UTF-8\n"),
        (["rl", "a=1", "--nproc", "2", os.fsdecode(b"b=\xff")], "rl: error: override b'b=\\xff' is not UTF-8\n"),
        (["quickstart", "--seed", "-1"], "-1 is not a seed; use a number of 0 or more, below 2^63"),
        (["generate", "m", "--seed", str(1 << 63)], f"{1 << 63} is not a seed"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "COMMAND"),
        (["schema", "ppo"], "invalid choice: 'ppo'"),
    ],
)
def test_bad_arguments_end_with_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["sft", "a=\u00fc"], ["generate", "m", "-p", "a=\u00fc"]])
def test_utf8_where_python_reads_arguments_otherwise_says_what_to_set(arguments):
    """The bytes are fine; Python, not the user's text, is to be told."""
    script = f"from shardwise.command_line import parse; parse({arguments[:-1]!r} + __import__('sys').argv[1:])"
    plain = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", script, arguments[-1].encode()], env=os.environ | plain, capture_output=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.decode().endswith(
        "b'a=\\xc3\\xbc' is not ASCII, as which Python reads arguments here; set PYTHONUTF8=1\n"
    )


def test_commands_that_take_a_model_say_alike_what_may_be_given(capsys):
    for command in ("generate", "export", "parity"):
        with pytest.raises(SystemExit):
            parse([command, "-h"])
        told = " ".join(capsys.readouterr().out.split())
        assert "a run's output folder (its newest checkpoint), a model folder or a hub name" in told, command
