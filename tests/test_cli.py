import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import yaml

from shardwise.__main__ import main as command
from shardwise.cli import main
from shardwise.config import RECIPES, RLConfig, SFTConfig, key_paths
from shardwise.controller.failures import Failure
from shardwise.controller.launch import LAUNCHER_VARIABLE
from shardwise.controller.watchdog import JOB_FOLDER_VARIABLE
from shardwise.recipes.checkpointing.writer_lock import writer_lock

SFT = ["model.path=m", "data.train_files=t.jsonl"]
ROW = '{"prompt": "2+3=", "response": "5"}\n'


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


def test_dry_run_prints_the_resolved_config_and_starts_nothing(tmp_path, capsys):
    """The model does not exist; what is printed is a config file that gives the same config."""
    file = tmp_path / "sft.yaml"
    file.write_text("model: {path: nowhere}\ndata: {train_files: [DATA]}\ntrainer: {seed: 3, batch_size: 8}\n")
    data = tmp_path / "t.jsonl"
    file.write_text(file.read_text().replace("DATA", str(data)))
    assert main(["sft", "-c", str(file), "--dry-run"]) == 2
    assert f"{data} does not exist" in capsys.readouterr().err
    data.write_text(ROW)
    assert main(["sft", "-c", str(file), "--dry-run", "trainer.seed=5", "--nproc", "2"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "resolved.yaml").write_text(printed)
    resolved = SFTConfig.load(tmp_path / "resolved.yaml")
    assert resolved == SFTConfig.load(file, ["trainer.seed=5"])
    assert (resolved.trainer.seed, resolved.trainer.batch_size, resolved.model.path) == (5, 8, "nowhere")
    closed = ("engine.lora.", "engine.module_precision.", "trainer.keep_best.")  # optional groups, and a list
    flat = [path for path in key_paths(SFTConfig) if not path.startswith(closed)]
    tree = yaml.safe_load(printed)
    for path in flat:  # every key is written out
        node = tree
        for name in path.split("."):
            node = node[name]
    assert list(tmp_path.iterdir()) != []


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "eval"])
def test_f16_f23_a_run_that_still_goes_on_is_named_before_torch_is_imported(recipe, tmp_path):
    reward = ["reward.functions=shardwise.rewards.math:exact_match"] if recipe == "rl" else []
    teacher = ["teacher.model.path=m"] if recipe == "distill" else []
    arguments = [recipe, *SFT, *reward, *teacher, f"trainer.output_dir={tmp_path}", "--nproc", "2"]
    script = (
        "import sys\nfrom shardwise.cli import main\n"
        f"code = main({arguments})\nprint(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    with writer_lock(tmp_path):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "2 False False\n", done.stderr
    assert done.stderr.startswith(f"error: trainer.output_dir={tmp_path} is written to by process {os.getpid()} on ")


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_schema_is_that_of_the_config_with_descriptions(recipe, capsys):
    assert main(["schema", recipe]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(RECIPES[recipe].model_fields)
    assert schema["additionalProperties"] is False
    fields = {
        f"{cls}.{name}": field for cls, group in schema["$defs"].items() for name, field in group["properties"].items()
    }
    assert {"path", "param_dtype", "validation_files"} <= {name.split(".")[1] for name in fields}
    # The tag of a choice needs no description: the class has one for each value.
    assert not [name for name, field in fields.items() if not (field.get("description") or "const" in field)]
    assert not [cls for cls, group in schema["$defs"].items() if not group.get("description")]


def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    assert main(["sft", *SFT, "trainer.sed=1"]) == 2
    assert capsys.readouterr().err == "error: the command line: trainer.sed: unknown key; did you mean trainer.seed?\n"


@pytest.fixture
def without_rights():
    """Inside, this process is no longer root, whom modes of files do not stop."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_path_that_this_user_may_not_read_is_one_line_and_exit_code_2(tmp_path, capsys, request):
    file = tmp_path / "closed" / "sft.yaml"
    file.parent.mkdir(mode=0)
    request.getfixturevalue("without_rights")
    assert main(["sft", "-c", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"error: {file}: Permission denied; give this user the right to it, or another path\n"
    )


@pytest.mark.parametrize("place", ["-c", "data.train_files", "trainer.output_dir", "trainer.resume", "model.path"])
@pytest.mark.parametrize("kind", ["loop", "long"])
def test_a_path_that_no_system_takes_is_one_line_and_exit_code_2(place, kind, tmp_path, capsys):
    path, data = tmp_path / ("loop" if kind == "loop" else "n" * 256), tmp_path / "t.jsonl"
    if kind == "loop":
        path.symlink_to(path)
    data.write_text('{"prompt": "1+1=", "response": "2"}\n')
    given = {"data.train_files": data, "trainer.output_dir": tmp_path / "run", "model.path": "m"} | {place: path}
    config = ["-c", str(given.pop("-c"))] if place == "-c" else []
    assert main(["sft", *config, *(f"{key}={value}" for key, value in given.items())]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(path) in line


def test_inputs_are_checked_before_ranks_are_started(capsys, monkeypatch):
    monkeypatch.setattr("shardwise.cli.launch", lambda *_args, **_options: pytest.fail("ranks were started"))
    assert main(["sft", *SFT, "--nproc", "4"]) == 2
    assert "data file t.jsonl does not exist" in capsys.readouterr().err


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Gives a command line of two ranks to `launch`; returns what it got."""
    data = tmp_path / "t.jsonl"
    data.write_text(ROW)

    def run(*more):
        seen = {}
        monkeypatch.setattr(
            "shardwise.cli.launch", lambda command, **options: seen.update(options, command=command) or 7
        )
        arguments = ["sft", "model.path=m", f"data.train_files={data}", f"trainer.output_dir={tmp_path}", *more]
        assert main(arguments) == 7
        return seen, arguments

    return run


def test_ranks_get_the_same_command_line(launched, tmp_path):
    seen, arguments = launched("--nproc", "3", "trainer.stop_grace_seconds=7")
    assert (seen["nproc"], seen["stop_grace_seconds"], seen["faults"]) == (3, 7, tmp_path / "faults")
    assert seen["command"][1:] == ["-m", "shardwise", *arguments]


def test_restarts_go_on_from_the_newest_checkpoint_of_this_job_alone(launched, tmp_path, capsys):
    """With resume=never a checkpoint of an earlier job must not be taken for one of this job. What was planned to go
    wrong has done so."""
    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    seen, _ = launched("--max-restarts", "2", "trainer.resume=never", "trainer.faults=[phase=optim]")
    assert seen["nproc"] == 1
    failure = Failure("it failed")
    again = [*seen["command"], "trainer.faults=[]"]
    assert seen["restarts"].after(failure, None) == again
    (tmp_path / "checkpoints" / "step_2").mkdir()
    (tmp_path / "checkpoints" / "step_4").rmdir()
    assert seen["restarts"].after(failure, 3) == [*again, "trainer.resume=auto"]
    resumed = SFTConfig.load(None, [a for a in [*again, "trainer.resume=auto"] if "=" in a]).trainer
    assert (resumed.resume, resumed.faults) == ("auto", [])
    assert capsys.readouterr().err.splitlines() == [
        "error: it failed",
        "restart 1 of 2: starts as before",
        "error: it failed",
        f"restart 2 of 2: resumes from {tmp_path / 'checkpoints' / 'step_2'}",
    ]


def test_a_job_in_the_background_goes_on_ignoring_ctrl_c_while_it_is_imported():
    script = (
        "import os, signal\nfrom shardwise.controller.signals import interruptible_imports\n"
        "with interruptible_imports():\n    os.kill(os.getpid(), signal.SIGINT)\nprint('on')"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            preexec_fn=partial(signal.signal, signal.SIGINT, as_found),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for as_found in (signal.SIG_IGN, signal.SIG_DFL)
    ]
    assert [(done.returncode, done.stdout, done.stderr) for done in found] == [
        (0, "on\n", ""),
        (130, "", "interrupted\n"),
    ]


LAUNCHER = """
import os, subprocess, sys
rank = {"RANK": "0", JOB_FOLDER: sys.argv[1], LAUNCHER: str(os.getpid())}
arguments = ["sft", "model.path=m", "data.train_files=t"]
subprocess.run([sys.executable, "-m", "shardwise", *arguments], env=os.environ | rank)
"""


def test_a_rank_ends_with_its_launcher_also_while_it_imports_torch(tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(1000)\n")
    code = LAUNCHER.replace("JOB_FOLDER", repr(JOB_FOLDER_VARIABLE)).replace("LAUNCHER", repr(LAUNCHER_VARIABLE))
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}
    ) as launcher:
        assert launcher.stdout.readline() == b"importing\n"
        launcher.kill()
        assert launcher.communicate(timeout=20) == (b"", None), "the rank has closed its output too"


def test_ctrl_c_is_exit_code_130(monkeypatch, capfd):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(RLConfig, "load", interrupted)
    monkeypatch.setattr(sys, "argv", ["shardwise", "rl"])
    assert command() == 130
    assert capfd.readouterr().err == "interrupted\n"
    monkeypatch.setenv("RANK", "1")
    assert command() == 130
    assert capfd.readouterr().err == "", "the launcher says it once"


def test_restarts_of_shardwise_are_refused_under_torchrun(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("SHARDWISE_JOB_FOLDER", raising=False)
    assert main(["sft", "--max-restarts", "2", "model.path=m", f"data.train_files={tmp_path}/a.jsonl"]) == 2
    assert capsys.readouterr().err == (
        "error: --max-restarts is of ranks that shardwise --nproc starts; give torchrun its own\n"
    )


def test_ctrl_c_while_the_command_is_imported_is_one_line():
    script = (
        "import builtins, sys\nfrom shardwise.__main__ import main\nimported = builtins.__import__\n"
        "def importing(name, *rest):\n"
        "    if name == 'pydantic':\n        raise KeyboardInterrupt\n"
        "    return imported(name, *rest)\n"
        "builtins.__import__ = importing\nsys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_output_that_nobody_reads_is_no_error_and_a_full_disk_is_one_line():
    end, other = os.pipe()
    os.close(end)
    for place, code, message in (
        (other, 0, b""),
        ("/dev/full", 2, b"error: standard output cannot be written to: [Errno 28] No space left on device\n"),
    ):
        with open(place, "wb") as output:
            whole = [sys.executable, "-m", "shardwise", "schema", "sft"]
            done = subprocess.run(whole, stdout=output, stderr=subprocess.PIPE, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (code, message)


def test_threads_that_hang_in_code_of_users_change_no_exit_code():
    """They wake up while the interpreter is taken down, in a library that then aborts the process."""
    script = (
        "import sys, threading, time\nfrom pydantic import validate_call\nfrom shardwise.__main__ import run\n"
        "@validate_call\ndef spin(n: int):\n    while True:\n        time.sleep(0.001)\n"
        "for _ in range(4):\n    threading.Thread(target=spin, args=(1,), daemon=True).start()\n"
        "sys.argv = ['shardwise', 'schema', 'sft']\nrun()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["title"] == "SFTConfig", "all of the output is there"


@pytest.mark.parametrize(
    ("arguments", "recipe", "given"),
    [
        (
            ["parity", "m", "--dtype", "bfloat16", "-p", "a", "-p", "b", "--max-tokens", "4"],
            "parity",
            {"engine": "embedded", "dtype": "bfloat16", "prompts": ["a", "b"], "max_tokens": 4},
        ),
        (["replay", "m", "--micro-batch", "2"], "replay", {"micro_batch": 2}),
    ],
    ids=["parity", "replay"],
)
def test_a_question_is_asked_with_the_options_and_its_answer_is_the_exit_code(monkeypatch, arguments, recipe, given):
    asked = []

    def answered(path, device, **options):
        asked.append((path, options))
        return False

    monkeypatch.setattr(f"shardwise.recipes.{recipe}.{recipe}", answered)
    assert main(arguments) == 1
    assert asked == [("m", given)]
