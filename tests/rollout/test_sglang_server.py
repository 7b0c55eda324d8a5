"""The process of an SGLang server: what it is told, who may ask it, and how its end is seen."""

import http.client
import importlib.util
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from stubbed_sglang import open_engine, request

from shardwise.config import ConfigError, TrainingError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_stub")]


@pytest.fixture(scope="module")
def folder(model_folders):
    return model_folders["llama"]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_without_sglang_the_error_says_how_to_install_it(folder):
    with pytest.raises(ConfigError, match=r"SGLang is not installed here; `pip install sglang` .*engine\.python"):
        open_engine(folder, python=None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model_path": "other"}, "args.model_path: Shardwise sets this itself, from model.path; set that, and"),
        ({"tensor-parallel-size": 2}, "args.tensor-parallel-size: .*, no key changes it; remove it"),
        ({"api_key": "mine"}, "args.api_key: Shardwise sets this itself, no key changes it; remove it"),
        ({"mem-fraction-static": 0.9}, "args.mem-fraction-static: .*, from rollout.engine.mem_fraction_static; set"),
        ({"attention_bakend": "fa3"}, "SGLang cannot start: .*unrecognized arguments: --attention-bakend fa3"),
    ],
)
def test_arguments_are_checked_by_sglangs_own_parser(folder, args, message):
    with pytest.raises(ConfigError, match=message):
        open_engine(folder, args=args)


def test_arguments_reach_the_server_and_keys_are_not_for_others_to_read(folder, sglang_engine, sglang_journal):
    (started,) = [event for event in sglang_journal() if "argv" in event][:1]
    words, keys = started["arguments"], (sglang_engine._server._key, sglang_engine._server._admin_key)
    given = dict(zip(words, [*words[1:], None], strict=True))
    assert given["--model-path"] == str(folder)
    assert given["--host"] == "127.0.0.1"
    assert (given["--max-running-requests"], given["--dtype"], given["--base-gpu-id"]) == ("4", "float32", "0")
    assert (given["--context-length"], given["--log-level"], given["--weight-version"]) == ("40", "error", "0")
    assert {"--skip-tokenizer-init", "--enable-deterministic-inference", "--disable-radix-cache"} <= set(words)
    assert {"--enable-memory-saver", "--sleep-on-idle"} <= set(words)
    assert "--enable-weights-cpu-backup" not in words
    assert (given["--api-key"], given["--admin-api-key"]) == keys
    assert keys[0] != keys[1]
    assert started["mode"] == 0o700, "of the folder that the file lies in"
    pid = sglang_engine._server._process.pid
    command, environment = (Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "environ"))
    assert "sglang.launch_server" in command
    assert not any(key in command + environment for key in keys)
    assert "TORCHELASTIC" not in environment
    assert not list(sglang_engine._server._log.parent.glob("*.yaml")), "it has been read"


def test_without_the_key_nothing_is_answered(sglang_engine):
    def status(path, key):
        connection = http.client.HTTPConnection("127.0.0.1", sglang_engine._server._port, timeout=30)
        connection.request("POST", path, "{}", {"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status

    for path, other in [("/generate", None), ("/update_weights_from_disk", sglang_engine._server._key)]:
        assert status(path, None) == status(path, "guessed") == 401
        assert other is None or status(path, other) == 401


@pytest.mark.parametrize("while_it", ["serves", pytest.param("idles", marks=pytest.mark.full)])
def test_a_killed_server_is_an_error_at_once(folder, while_it):
    engine = open_engine(folder)
    process = engine._server._process
    if while_it == "idles":
        process.kill()
        process.wait()
    else:
        threading.Timer(0.5, process.kill).start()
    began = time.monotonic()
    with pytest.raises(TrainingError, match="the SGLang server of rank 0 died: "):
        engine.generate([request(num_completions=4000, max_tokens=100)])
    assert time.monotonic() - began < 5
    engine.close()


@pytest.mark.alone
def test_a_stopped_server_is_an_error_after_the_health_timeout_and_can_be_closed(folder, monkeypatch):
    monkeypatch.setattr("shardwise.rollout.sglang_server._GLANCE_SECONDS", 0.5)
    engine = open_engine(folder, health_timeout_seconds=1.0)
    process, log = engine._server._process, engine._server._log
    assert engine.generate([request(num_completions=200, max_tokens=100)]), "slower than the timeout, and healthy"
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(TrainingError, match="no sign of life for health_timeout_seconds=1; it printed last"):
        engine.generate([request()])
    engine.close()
    assert process.returncode == -signal.SIGKILL
    assert not log.parent.exists()


@pytest.mark.full
def test_a_killed_server_leaves_no_names_of_its_own_and_keeps_those_of_others(folder, sglang_journal):
    other = Path("/dev/shm/sglang_loads_of_another_0123abcd.shm")
    with other.open("wb"):
        engine = open_engine(folder)
        engine._server._process.kill()
        engine.close()
        *_, left = [event["left"] for event in sglang_journal() if "left" in event]
        assert len(left) == 2
        assert [name for name in left if Path(name).exists()] == []
        assert other.exists()
    other.unlink()


RANK = """
import sys, time
sys.path[:0] = [{tests!r}]
from pathlib import Path
from stubbed_sglang import open_engine
print(open_engine(Path({folder!r}))._server._process.pid, flush=True)
time.sleep(600)
"""


def test_no_server_outlives_its_rank(folder):
    body = RANK.format(tests=str(Path(__file__).parent), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True) as rank:
        pid = int(rank.stdout.readline())
        assert is_running(pid)
        rank.kill()
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """One whose parent has not asked for its end yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
