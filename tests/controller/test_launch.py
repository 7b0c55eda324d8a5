"""`launch` with small programs as ranks: what is printed, what is returned, and that no process is left."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from shardwise.controller import launch as launching
from shardwise.controller.launch import launch

ROOT = Path(__file__).parents[2]
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from shardwise.config import DataError
from shardwise.controller.failures import note_failure
from shardwise.controller.launch import die_with_launcher
rank = int(os.environ["RANK"])
Path(sys.argv[1], f"pid-{rank}").write_text(str(os.getpid()))
die_with_launcher()
while len(list(Path(sys.argv[1]).glob("pid-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)  # nobody fails before all are there
"""


@pytest.fixture
def left_alive():
    """Processes that the test ends at last, whatever it asserts."""
    left: list[subprocess.Popen[bytes]] = []
    yield left
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Makes the command line of a rank from its body, which finds `rank`, `note_failure` and the modules above."""
    monkeypatch.chdir(ROOT)

    def make(body: str) -> list[str]:
        script = tmp_path / "rank.py"
        script.write_text(f"sys_path_root = {str(ROOT)!r}\nimport sys\nsys.path.insert(0, sys_path_root)\n{PRELUDE}")
        script.write_text(script.read_text() + textwrap.dedent(body))
        return [sys.executable, str(script), str(tmp_path)]

    return make


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(folder: Path, count: int, *, within_seconds: float = 0.0) -> None:
    deadline = time.monotonic() + within_seconds
    while any(map(is_running, pids(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids(folder)) == count
    assert not [pid for pid in pids(folder) if is_running(pid)]


def test_all_ranks_get_their_numbers_and_succeed(command, tmp_path, capfd):
    body = """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    Path(sys.argv[1], f"out-{rank}").write_text(" ".join(os.environ[name] for name in names))
    """
    assert launch(command(body), nproc=3) == 0
    assert [(tmp_path / f"out-{rank}").read_text() for rank in range(3)] == ["0 0 3 3", "1 1 3 3", "2 2 3 3"]
    assert capfd.readouterr().err == ""


def test_a_rank_that_raises_ends_the_others_and_is_named(command, tmp_path, capfd):
    body = """
    if rank == 1:
        try:
            raise ValueError("the moon is full")
        except ValueError as error:
            sys.exit(note_failure(error, rank))
    time.sleep(60)
    """
    assert launch(command(body), nproc=3) == 1
    last_start = max(path.stat().st_mtime for path in tmp_path.glob("pid-*"))  # how long ranks start is no matter
    assert time.time() - last_start < 5
    stderr = capfd.readouterr().err
    assert stderr.splitlines()[-1] == "error: rank 1 failed: the moon is full"
    assert stderr.count("Traceback") == 1
    assert_gone(tmp_path, 3)


def test_a_mistake_of_the_user_is_one_line_and_exit_code_2(command, tmp_path, capfd):
    """Every rank notices it; it is printed once. The word peer in it does not make it a lost connection."""
    body = """
    sys.exit(note_failure(DataError("data file /peer/train.jsonl does not exist"), rank))
    """
    assert launch(command(body), nproc=2) == 2
    assert capfd.readouterr().err == "error: data file /peer/train.jsonl does not exist\n"
    assert_gone(tmp_path, 2)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
def test_a_rank_ended_by_a_signal_is_named_before_the_peers_that_lost_it(command, tmp_path, capfd, name):
    body = f"""
    if rank == 1:
        os.kill(os.getpid(), signal.{name})
    time.sleep(0.2)
    sys.exit(note_failure(RuntimeError("Connection closed by peer [127.0.0.1]:4711"), rank))
    """
    assert launch(command(body), nproc=2) == (143 if name == "SIGTERM" else 1)
    assert capfd.readouterr().err == f"error: rank 1 was ended by {name}; the other ranks were stopped\n"
    assert_gone(tmp_path, 2)


def test_the_cause_is_reported_even_if_a_peer_that_lost_the_connection_was_faster(command, capfd):
    body = """
    lost = Path(sys.argv[1], "lost")
    if rank == 1:
        note_failure(RuntimeError("Connection closed by peer"), rank)
        lost.touch()
        time.sleep(60)
    while not lost.exists():
        time.sleep(0.01)
    sys.exit(note_failure(DataError("train.jsonl line 3: broken"), rank))
    """
    assert launch(command(body), nproc=2) == 2
    assert capfd.readouterr().err == "error: train.jsonl line 3: broken\n"


def test_a_rank_that_leaves_no_reason_is_named_with_its_exit_code(command, capfd):
    assert launch(command("if rank == 1: os._exit(7)\ntime.sleep(60)"), nproc=2) == 1
    assert capfd.readouterr().err == "error: rank 1 exited with code 7 and left no reason\n"


def test_a_rank_that_the_kernel_does_not_let_go_is_named_and_not_waited_for(command, capfd, monkeypatch, left_alive):
    """As one does whose file system or driver does not answer; here SIGKILL does not reach it."""
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: left_alive.append(process))
    monkeypatch.setattr("shardwise.controller.launch._LEAVE_SECONDS", 0.5)
    began = time.monotonic()
    assert launch(command("sys.exit(7) if rank == 0 else time.sleep(60)"), nproc=2) == 1
    assert time.monotonic() - began < 20
    stuck = left_alive[1]
    assert (
        f"warning: rank 1 (process {stuck.pid}) has not ended 0 s after SIGKILL: the kernel holds it"
        in capfd.readouterr().err
    )
    left_alive[:] = [stuck]


def test_ranks_that_catch_signals_are_ended_too(command, tmp_path):
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.argv[1], f"deaf-{rank}").write_text("")
    while rank == 1 and not Path(sys.argv[1], "deaf-0").exists():
        time.sleep(0.01)
    if rank == 1:
        os._exit(3)
    time.sleep(60)
    """
    assert launch(command(body), nproc=2) == 1
    # Rank 1 left then; how long ranks start is no matter.
    assert time.time() - (tmp_path / "deaf-0").stat().st_mtime < 4
    assert_gone(tmp_path, 2)


def start_launcher(
    command: list[str], folder: Path, *, grace: float = 0, more: str = "", **options
) -> subprocess.Popen:
    """`more`: further arguments, as code."""
    call = f"launch({command!r}, nproc=2, stop_grace_seconds={grace}, {more})"
    code = f"import sys; from shardwise.controller.launch import launch; sys.exit({call})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)
    deadline = time.monotonic() + 60
    while len(pids_written := list(folder.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids_written) == 2
    return process


# A rank deep in a collective neither returns to Python nor looks at signals: both are deaf here.
DEAF = """
for name in ("SIGTERM", "SIGHUP", "SIGPIPE"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
Path(sys.argv[1], f"ready-{rank}").write_text("")
time.sleep(60)
"""


def test_ranks_end_within_5_seconds_when_the_launcher_is_killed(command, tmp_path):
    process = start_launcher(command(DEAF), tmp_path)
    assert all(map(is_running, pids(tmp_path)))
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=5)
    assert_gone(tmp_path, 2, within_seconds=5)


def test_ranks_end_within_5_seconds_when_torchrun_is_killed(command, tmp_path):
    start = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    variables = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    process = subprocess.Popen([sys.executable, "-c", start, *command(DEAF)], env=os.environ | variables)
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready-0").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(is_running, pids(tmp_path)))
    process.kill()
    process.wait(timeout=5)
    assert_gone(tmp_path, 1, within_seconds=5)


def test_a_rank_that_is_stopped_ends_too_when_the_launcher_is_killed(command, tmp_path):
    """SIGKILL alone reaches it."""
    process = start_launcher(command(DEAF), tmp_path)
    stopped = int((tmp_path / "pid-1").read_text())
    os.kill(stopped, signal.SIGSTOP)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=5)
    try:
        assert_gone(tmp_path, 2, within_seconds=5)
    finally:
        if is_running(stopped):
            os.kill(stopped, signal.SIGKILL)


def test_a_rank_whose_launcher_is_already_gone_ends_at_once(command, tmp_path):
    rank = [*command("time.sleep(60)")]
    gone = subprocess.Popen(["true"])
    gone.wait()
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "SHARDWISE_LAUNCHER": str(gone.pid)}
    assert subprocess.run(rank, env=environment, timeout=30, check=False).returncode == 1


def test_a_rank_that_a_signal_has_ended_before_the_launcher_is_told_of_it_has_not_failed(command, monkeypatch, capfd):
    """A thread tells it, and another rank may take longer."""
    wait_for_end = launching._wait

    def wait(ranks, asked, *rest):
        wait_for_end(ranks, [], *rest)
        threading.Timer(0.02, asked.append, [signal.SIGINT]).start()

    monkeypatch.setattr(launching, "_wait", wait)
    body = """
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    Path(sys.argv[1], f"ready-{rank}").write_text("")
    while rank == 0 or not Path(sys.argv[1], "ready-0").exists():
        time.sleep(0.01)
    sys.exit(130)
    """
    assert launch(command(body), nproc=2, stop_grace_seconds=5) == 130
    assert capfd.readouterr().err == "interrupted; all ranks ended\n"


def test_ctrl_c_ends_every_rank_and_returns_130(command, tmp_path):
    """A terminal sends SIGINT to the whole process group, ranks included."""
    body = """
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # once from the terminal, once more from the launcher
    Path(sys.argv[1], f"ready-{rank}").write_text("")
    time.sleep(60)
    """
    process = start_launcher(command(body), tmp_path, start_new_session=True)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert stderr == "interrupted; all ranks ended\n"
    assert_gone(tmp_path, 2)


def test_sigterm_ends_every_rank_and_leaves_no_folder(command, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    process = start_launcher(command(DEAF), tmp_path)
    assert list((tmp_path / "tmp").glob("shardwise-*"))
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert_gone(tmp_path, 2)
    assert not list((tmp_path / "tmp").glob("shardwise-*"))


# Rank 0 needs a moment for its checkpoint; the other rank ends when it is told to.
SAVING = """
from shardwise.controller.signals import pass_on, stop_signals
folder, asked = Path(sys.argv[1]), []
with stop_signals(asked.append if rank == 0 else pass_on):
    (folder / f"ready-{rank}").write_text("")
    while not (asked if rank == 0 else (folder / "shutdown").exists()):
        time.sleep(0.01)
    if rank == 0:
        time.sleep(float(sys.argv[2]))
        (folder / "saved").write_text(str(set(asked)))
        (folder / "shutdown").write_text("")
        sys.exit(128 + asked[0])
"""


@pytest.mark.parametrize(
    "to",
    [
        *("launcher", "rank 0", "all, of a terminal that closes"),
        *(pytest.param(one, marks=pytest.mark.full) for one in ("rank 1", "all")),
    ],
)
def test_f11_wherever_a_signal_arrives_rank_0_saves_and_the_job_ends_with_its_code(command, tmp_path, to):
    heeded = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where these tests are run under nohup
    options = {"start_new_session": True, "preexec_fn": heeded}
    process = start_launcher([*command(SAVING), "0.3"], tmp_path, grace=20, **options)
    number = {"all": signal.SIGINT, "all, of a terminal that closes": signal.SIGHUP}.get(to, signal.SIGTERM)
    if to.startswith("all"):  # by Ctrl-C
        os.killpg(process.pid, number)
    else:
        pid = process.pid if to == "launcher" else int((tmp_path / f"pid-{to[-1]}").read_text())
        os.kill(pid, number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert (tmp_path / "saved").read_text() == f"{{{int(number)}}}"
    said = {
        "launcher": "terminated; all ranks ended\n",
        "all": "interrupted; all ranks ended\n",
        "all, of a terminal that closes": "stopped, for its terminal closed; all ranks ended\n",
    }
    assert stderr == said.get(to, "")
    assert_gone(tmp_path, 2)


def test_f10_a_second_signal_ends_all_ranks_at_once(command, tmp_path):
    more = "without_saving=lambda: 'without saving; it resumes from step_4'"
    process = start_launcher([*command(SAVING), "60"], tmp_path, grace=60, more=more)
    process.terminate()
    time.sleep(0.3)
    assert process.poll() is None
    process.terminate()
    _, stderr = process.communicate(timeout=5)
    assert process.returncode == 143
    assert stderr == "terminated; all ranks ended without saving; it resumes from step_4\n"
    assert not (tmp_path / "saved").exists()
    assert_gone(tmp_path, 2)


def test_a_checkpoint_that_fails_on_the_way_out_is_told(command, tmp_path):
    body = SAVING.replace("sys.exit(128", "sys.exit(note_failure(DataError('the disk is full'), rank) or 128")
    process = start_launcher([*command(body), "0"], tmp_path, grace=20)
    process.terminate()
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (2, "error: the disk is full\n")


def test_rank_0_may_end_the_job_by_itself_with_a_code_that_is_no_failure(command, tmp_path, capfd):
    body = """
    time.sleep(0.5 * rank)
    Path(sys.argv[1], f"done-{rank}").write_text("")
    sys.exit(75 if rank == 0 else 0)
    """
    assert launch(command(body), nproc=2) == 75
    assert len(list(tmp_path.glob("done-*"))) == 2
    assert capfd.readouterr().err == ""


def test_a_rank_that_crashes_leaves_the_stacks_of_all(command, tmp_path, capfd):
    body = """
    import faulthandler
    from shardwise.controller.watchdog import be_watched, commanded
    be_watched(rank)

    def innermost():
        Path(sys.argv[1], f"ready-{rank}").write_text("")
        while rank == 0 or not Path(sys.argv[1], "ready-0").exists():
            time.sleep(0.01)
        faulthandler._sigsegv()

    with commanded("train", ["policy"]):
        innermost()
    """
    assert launch(command(body), nproc=2, faults=tmp_path / "faults") == 1
    assert capfd.readouterr().err == (
        "error: rank 1 was ended by SIGSEGV in `train policy`; the other ranks were stopped; stacks of every rank: "
        f"{tmp_path / 'faults' / '1'}\n"
    )
    for rank in (0, 1):
        report = (tmp_path / "faults" / "1" / f"rank_{rank}.txt").read_text()
        assert report.startswith(f"rank {rank}: `train policy`, for ")
        assert "in innermost" in report


def test_a_failure_without_a_launcher_is_printed_by_the_rank(capsys, monkeypatch):
    from shardwise.config import ConfigError
    from shardwise.controller.failures import note_failure

    monkeypatch.delenv("SHARDWISE_JOB_FOLDER", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert note_failure(ConfigError("use 1, 2 or 4"), 0) == 2
    assert capsys.readouterr().err == "error: use 1, 2 or 4\n"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert note_failure(ConfigError("use 1, 2 or 4"), 3) == 2
    assert capsys.readouterr().err == "error: rank 3: use 1, 2 or 4\n"
    shared = ConfigError("use 1, 2 or 4")
    shared.is_shared = True
    assert note_failure(shared, 3) == 2
    assert capsys.readouterr().err == ""
    assert note_failure(shared, 0) == 2
    assert capsys.readouterr().err == "error: use 1, 2 or 4\n"
    assert note_failure(ZeroDivisionError("division by zero"), 3) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: rank 3: division by zero"
    assert note_failure(RuntimeError("Connection closed by peer [127.0.0.1]:4"), 3) == 1
    assert capsys.readouterr().err == "rank 3: another rank ended or hangs; its own message tells why\n"


def test_the_time_of_a_job_counts_from_where_the_command_began(command, tmp_path):
    body = """
    from shardwise.controller.launch import seconds_since_start
    Path(sys.argv[1], "age").write_text(str(seconds_since_start()))
    """
    assert launch(command(body), nproc=1, started=time.monotonic() - 1000) == 0
    assert 1000 <= float((tmp_path / "age").read_text()) < 1000 + 60


def test_the_command_counts_what_it_does_before_ranks_are_there():
    """Looking at the inputs imports torch, which takes seconds."""
    script = (
        "import time, sys; from shardwise import cli; begun = time.monotonic(); cli.launch = lambda *_, **given: "
        "print(given['started'] <= begun) or 0; sys.exit(cli._launch_training(config, options, []))"
    )
    setup = (
        "from types import SimpleNamespace as N; from shardwise.config import SFTConfig; "
        "config = SFTConfig.parse({'model': {'path': 'm'}, 'data': {'train_files': 't'}}, origin='test'); "
        "options = N(nproc=2, max_restarts=0); "
    )
    done = subprocess.run([sys.executable, "-c", setup + script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "True\n"
