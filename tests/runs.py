"""A tiny model and data, and the command line as a user calls it: fixtures of tests/e2e and tests/faults."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import fork_server
from tiny_models import tiny_folder

from shardwise.cli import main
from shardwise.data.synthetic import arithmetic_problems, build_model_folder, train_tokenizer
from shardwise.fault_plan import VARIABLE as FAULT_PLAN

ROOT = Path(__file__).parents[1]
RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "SHARDWISE_JOB_FOLDER", "SHARDWISE_LAUNCHER", "SHARDWISE_RANK_0"),
    *("SHARDWISE_STARTED", "SHARDWISE_STORE"),
)
MARK = "SHARDWISE_TEST_MARK"
"""An environment variable that every process of a run inherits, by which it is found again."""
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info):
    """More digits are better; `acc` looks at what the row brought along."""
    digits = sum(char.isdigit() for char in solution_str)
    return {"score": digits / 10 + len(solution_str) % 3, "acc": extra_info["index"] % 2, "truth": float(ground_truth)}
'''


@dataclass(frozen=True)
class Assets:
    model: Path
    sft: Path
    rl: Path
    parquet: Path
    reward: str


@pytest.fixture(scope="session")
def assets(tmp_path_factory) -> Assets:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("assets")
    tokenizer = train_tokenizer(["2+3=5"], vocab_size=261)
    build_model_folder(
        folder / "model",
        tokenizer=tokenizer,
        hidden_size=32,
        num_layers=2,
        intermediate_size=64,
        max_position_embeddings=96,
    )
    files = arithmetic_problems(folder / "data", seed=0, num_held_out=24)
    for file in (files.sft_train, files.rl_train):
        keep_first_rows(file)
    (folder / "rules.py").write_text(REWARD)
    _write_verl_parquet(folder / "verl.parquet")
    return Assets(
        folder / "model",
        files.sft_train,
        files.rl_train,
        folder / "verl.parquet",
        f"{folder / 'rules.py'}:compute_score",
    )


def keep_first_rows(file: Path, num_rows: int = 256) -> None:
    """Of a jsonl file: no run of a test sees more of them, and rendering ten thousand takes seconds."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[:num_rows]), encoding="utf-8")


def granite_folder(assets: Assets, folder: Path) -> str:
    """A model of another family, of which transformers has no class with a value head; the same tokenizer."""
    from transformers import AutoTokenizer

    tiny_folder("granite", folder, vocab_size=261, max_position_embeddings=96)
    AutoTokenizer.from_pretrained(assets.model).save_pretrained(folder)
    return str(folder)


def _write_verl_parquet(path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "data_source": "sums" if i % 2 else "products",
            "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i}+{i}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(20)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def shell():
    """Runs `python -m ARGUMENTS`; afterwards no process that it started may be left, reward processes included."""

    runs = itertools.count()

    def run(*arguments: str, timeout: float = 90) -> Finished:
        environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        mark = f"shell-{os.getpid()}-{next(runs)}"
        path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, MARK: mark}
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            left = marked_processes(mark)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left behind: {left}"
        return Finished(process.returncode, out, err)

    return run


def marked_processes(mark: str) -> list[int]:
    """The living processes that carry the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # ended meanwhile; a zombie's environment is empty
            continue
    return found


def shared_memory() -> set[str]:
    """What is in /dev/shm and no living process uses, but for semaphores of Python's, which tests beside this one make
    and Shardwise does not."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile
            used |= {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return {str(path) for path in Path("/dev/shm").glob("*") if not path.name.startswith("sem.mp-")} - used


@pytest.fixture(scope="session")
def marked():
    return marked_processes


class StartedRun:
    """A command that runs while the test goes on; `stderr` and `stdout` are files in `folder`, its temporary files in
    `tmp`."""

    def __init__(self, folder: Path, tmp: Path, *arguments: str, faults: str = "") -> None:
        self.folder, self.mark = folder, f"{folder}-{time.monotonic()}"
        self.run = next(Path(a.partition("=")[2]) for a in arguments if ".output_dir=" in a)
        self._tmp, self._shared_memory_before = tmp, shared_memory()
        environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: self.mark}
        environment |= {"TMPDIR": str(tmp), FAULT_PLAN: faults}
        with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "shardwise", *arguments],
                cwd=ROOT,
                env=environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def steps(self) -> list[int]:
        """In metrics.jsonl; the last line may be half written."""
        metrics = self.run / "metrics.jsonl"
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def wait_until(self, condition: Callable[[], object], *, seconds: float = 300) -> None:
        """While the launcher lives."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.launcher.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.01)

    def ranks(self) -> dict[int, int]:
        """Process id by rank, of those that the launcher has now."""
        found = {}
        for pid in marked_processes(self.mark):
            with contextlib.suppress(OSError):  # ended meanwhile
                variables = dict(v.partition("=")[::2] for v in Path(f"/proc/{pid}/environ").read_text().split("\0"))
                parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent == self.launcher.pid:
                    found[int(variables["RANK"])] = pid
        return found

    def processes(self) -> list[int]:
        return marked_processes(self.mark)

    def _left(self) -> list[str]:
        """The processes of the run, and what is in /dev/shm since it began (a test beside this one may have it for a
        moment)."""
        return [*map(str, self.processes()), *sorted(shared_memory() - self._shared_memory_before)]

    def end(self, *, seconds: float = 300) -> int:
        """Waits for the exit code; five seconds later no process may be left, nothing in /dev/shm, and no temporary
        folder, unless the launcher was killed."""
        code = self.launcher.wait(timeout=seconds)
        deadline = time.monotonic() + 5
        left = self._left()
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = self._left()
        assert not left, left
        if code != -signal.SIGKILL:
            assert not list(self._tmp.glob("*shardwise*"))
        return code


@pytest.fixture
def start(tmp_path):
    """`start("sft", "trainer.output_dir=...", faults="")`: a StartedRun, of which nothing is left after the test."""
    runs = []
    tmp = tmp_path / "tmp"
    tmp.mkdir()

    def begin(*arguments: str, faults: str = "") -> StartedRun:
        folder = tmp_path / f"started-{len(runs)}"
        folder.mkdir()
        runs.append(StartedRun(folder, tmp, *arguments, faults=faults))
        return runs[-1]

    yield begin
    for run in runs:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)
        run.launcher.wait()


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """`job(2, "sft", *overrides)`: as `shell("shardwise", ..., "--nproc", "2")`, of ranks that nothing watches, in
    processes that need not import torch: seconds sooner."""

    def run(nproc: int, *arguments: str, timeout: float = 240) -> Finished:
        folder = tmp_path_factory.mktemp("job")
        ranks = [
            fork_server().Process(target=_rank, args=(arguments, rank, nproc, str(folder))) for rank in range(nproc)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + timeout
        try:
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
        finally:
            hung = [rank.pid for rank in ranks if rank.is_alive()]
            for rank in ranks:
                rank.kill()
                rank.join()
            left = marked_processes(str(folder))
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        out, err = ("".join((folder / f"{name}-{n}").read_text() for n in range(nproc)) for name in ("out", "err"))
        assert not hung, f"ranks {hung} did not end within {timeout} s: {err}"
        assert not left, f"processes left behind: {left}"
        return Finished(max((rank.exitcode for rank in ranks), key=abs), out, err)

    return run


def _rank(arguments: tuple[str, ...], rank: int, nproc: int, folder: str) -> None:
    for variable in RANK_VARIABLES:
        os.environ.pop(variable, None)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(nproc), MARK: folder}
    os.environ |= {"SHARDWISE_STORE": f"{folder}/store", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    os.environ["SHARDWISE_STARTED"] = str(time.monotonic())  # the server that forked this process may be old
    os.chdir(ROOT)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        with open(f"{folder}/{name}-{rank}", "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    torch.set_num_threads(1)
    sys.exit(main(list(arguments)))


@pytest.fixture
def command(monkeypatch, capfd):
    """The same in this process, on one rank: faster, because torch is here already."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> Finished:
        children = _children()
        capfd.readouterr()
        try:
            code = main(list(arguments))
        except SystemExit as exit:  # argparse
            code = exit.code
        out, err = capfd.readouterr()
        assert _children() <= children, "a process was left behind"
        return Finished(code, out, err)

    return run


def _children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found |= set(task.read_text().split())
    return found


@pytest.fixture(scope="session")
def metrics_of():
    def read(folder: Path) -> list[dict]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    return read
