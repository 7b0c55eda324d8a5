"""Training processes that step only when told, so that one benchmark can take turns between them.

The parent writes "N" and a newline for N optimizer steps; the child answers with one JSON line. End of input ends the
training, and a last JSON line gives the memory. Standard library only: peers import it in their own interpreter.
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[2]


class Pacer:
    """The child's end. The clock runs from the parent's word to the end of the last step: data loading counts."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints goes to stderr
        self._remaining = 0
        self._tokens = 0
        self._losses: list[float] = []
        self._figures: list[dict[str, float]] = []
        self._start = self._start_cpu = 0.0
        self._loaded_bytes = 0

    def ready(self) -> bool:
        """Says that everything is loaded, and waits for the first steps. False: there are none."""
        self._loaded_bytes = memory_bytes("VmRSS")
        self._answer({"ready": True})
        return self._wait()

    def step_done(self, num_tokens: int, loss: float, **figures: float) -> bool:
        """Counts a step, with what else is to be known of it; after the last one asked for, answers and waits. False:
        training is over."""
        self._tokens += num_tokens
        self._losses.append(loss)
        self._figures.append(figures)
        self._remaining -= 1
        if self._remaining:
            return True
        seconds = time.perf_counter() - self._start
        cpu_seconds = time.process_time() - self._start_cpu
        times = {"seconds": seconds, "cpu_seconds": cpu_seconds}
        self._answer({"tokens": self._tokens, "losses": self._losses, "figures": self._figures} | times)
        return self._wait()

    def _wait(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            self._answer({"peak_bytes": memory_bytes("VmHWM"), "loaded_bytes": self._loaded_bytes})
            return False
        self._remaining, self._tokens, self._losses, self._figures = int(line), 0, [], []
        self._start, self._start_cpu = time.perf_counter(), time.process_time()
        return True

    def _answer(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._answers, flush=True)


class Child:
    """The parent's end: one side of a comparison."""

    def __init__(self, python: str, module: str, arguments: Sequence[str], *, threads: int) -> None:
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
        quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "TRL_EXPERIMENTAL_SILENCE": "1"}
        # A side that waits for its turn must sleep, not spin on the cores of the side that runs.
        environment = os.environ | offline | quiet | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self._module = module
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "SHOW_CHILD_ERRORS" not in os.environ else None,
            text=True,
        )
        self._read()

    def steps(self, count: int) -> dict[str, Any]:
        """Runs `count` optimizer steps. Returns tokens, seconds, cpu_seconds, and losses and figures step by step."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return self._read()

    def finish(self) -> dict[str, Any]:
        """Ends the process. Returns peak_bytes and loaded_bytes of its resident memory."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        answer = self._read()
        self._process.wait()
        return answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended early; set SHOW_CHILD_ERRORS=1 to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def memory_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process; where there is no /proc, the peak that getrusage knows."""
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    match = re.search(field + r":\s+(\d+) kB", status.read_text())
    assert match is not None
    return 1024 * int(match.group(1))
