"""A clock that is set a year ahead, or back, in the middle of a run, which saves, goes on and keeps its deadlines.

The clock of all processes of the run is one of ours: a library before the C library adds what a shared file says.
"""

import datetime
import json
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

YEAR = 365 * 24 * 3600
STEPS = 12
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *seconds; /* by which the clock is wrong */

__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("WRONG_CLOCK"), O_RDONLY);
    seconds = mmap(0, sizeof *seconds, PROT_READ, MAP_SHARED, file, 0);
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && seconds) now->tv_sec += *seconds;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}

/* The kernel's clock was not set: a moment of ours is a moment of its own. Those of other clocks are small. */
static struct timespec right(const struct timespec *moment) {
    struct timespec result = *moment;
    if (result.tv_sec > 1000000000) result.tv_sec -= *seconds;
    return result;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", VERSION);
    struct timespec moment = right(until);
    return next(condition, mutex, &moment);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*next)(sem_t *, const struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moment = right(until);
    return next(semaphore, &moment);
}
"""
VERSIONS = {"x86_64": "GLIBC_2.3.2", "aarch64": "GLIBC_2.17"}
"""Of pthread_cond_timedwait, of which the C library has an older one too."""


class Clock:
    """Of the processes that a test starts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        """So far from the right time, from now on."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True).stdout.strip()
    if shutil.which("cc") is None or machine not in VERSIONS:
        pytest.skip("a clock that can be set needs a C compiler")
    source = tmp_path_factory.mktemp("clock") / "clock.c"
    source.write_text(CLOCK)
    library = source.with_suffix(".so")
    version = f'-DVERSION="{VERSIONS[machine]}"'
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", version, "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture
def clock(library, tmp_path, monkeypatch) -> Clock:
    clock = Clock(tmp_path / "wrong by")
    monkeypatch.setenv("WRONG_CLOCK", str(tmp_path / "wrong by"))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    return clock


def options_of(assets, run):
    return [
        f"model.path={assets.model}",
        f"data.train_files={assets.sft}",
        "data.max_train_rows=20",
        "data.max_sequence_tokens=64",
        "engine.collective_timeout_seconds=20",
        "trainer.batch_size=8",
        "trainer.learning_rate=5e-3",
        f"trainer.total_steps={STEPS}",
        "trainer.save_every_steps=1",
        "trainer.keep_last=2",
        "trainer.save_timeout_seconds=60",
        "trainer.stall_timeout_seconds=60",
        "trainer.max_time_seconds=600",
        "trainer.tensorboard=false",
        f"trainer.output_dir={run}",
    ]


def time_of_day_in(run) -> float:
    """When the run says it has begun, as its own clock had it."""
    since = json.loads((run.run / "run.lock").read_text())["since"]
    return datetime.datetime.fromisoformat(since).timestamp()


@pytest.mark.full
def test_a_clock_that_jumps_a_year_ahead_and_back_changes_nothing(assets, clock, job, start, tmp_path):
    """What resumes from the checkpoints of the year ahead is a year behind: steps count, not times."""
    arguments = ["sft", "--nproc", "2", *options_of(assets, tmp_path / "run")]
    run = start(*arguments, faults="phase=forward action=slow")
    run.wait_until(lambda: run.steps[-1:] >= [2])
    clock.set(YEAR)
    run.wait_until(lambda: run.steps[-1] >= 5)
    clock.set(-YEAR)
    run.wait_until(lambda: run.steps[-1] >= 8)
    run.launcher.terminate()
    assert run.end() == 143, run.err
    stopped = run.steps[-1]
    assert run.err.splitlines() == ["SIGTERM: saves and stops after this step", "terminated; all ranks ended"]
    assert kept(run.run) == [stopped - 1, stopped]

    again = start(*arguments, faults="phase=forward action=slow")
    again.wait_until(lambda: again.steps[-1] > stopped)
    assert time_of_day_in(again) == pytest.approx(time.time() - YEAR, abs=3600)
    clock.set(YEAR)
    assert again.end() == 0, again.err
    assert f"resumes from {run.run}/checkpoints/step_{stopped}\n" in again.out
    assert kept(run.run) == [STEPS - 1, STEPS]

    undisturbed = tmp_path / "undisturbed"
    done = job(2, "sft", *options_of(assets, undisturbed))
    assert done.code == 0, done.err
    assert (run.run / "metrics.jsonl").read_text() == (undisturbed / "metrics.jsonl").read_text()
    weights = f"checkpoints/step_{STEPS}/hf/model.safetensors"
    assert (run.run / weights).read_bytes() == (undisturbed / weights).read_bytes()


def kept(run) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))


@pytest.mark.full
@pytest.mark.parametrize("jump", [YEAR, -YEAR], ids=["ahead", "back"])
def test_a_rank_that_hangs_is_found_in_time_whatever_the_clock_did(assets, clock, start, tmp_path, jump):
    run = start(
        *("sft", "--nproc", "2", *options_of(assets, tmp_path / "run")),
        faults="phase=forward action=slow; rank=1 step=6 phase=allreduce action=hang",
    )
    run.wait_until(lambda: run.steps[-1:] >= [2])
    clock.set(jump)
    run.wait_until(lambda: run.steps[-1] == 5)
    hung = time.monotonic()
    assert run.end() == 1
    assert 15 < time.monotonic() - hung < 20 + 20
    assert "error: rank 1 hangs in step 6, `train policy`: rank 0 waited in vain" in run.err
