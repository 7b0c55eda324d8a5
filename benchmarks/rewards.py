"""10,000 reward calls of 1 ms through the pool, all well-behaved and with 1 % that hang: throughput against the bound.

The bound of a run is what `num_workers` slots could do at best. A call of 1 ms occupies its slot for as long as the
function itself measured (a sleep of 1 ms takes a little longer, and much longer on a busy machine); a call that hangs
occupies it for the deadline, reward.timeout_seconds. With S the sum of both over all calls,

    seconds at best = S / num_workers        share of the bound = seconds at best / seconds of the run

so everything else counts against the pool: pipes, JSON, idle slots, killing and replacing processes, the tail of the
run. `share_of_nominal` takes 1 ms for every call instead of what was measured. Queueing is, for every call that
returned, the time until it began, minus what a queue that moves evenly gives it (call i of n begins at i / n of the
run). Its 99th percentile tells whether calls waited behind a hang. `children_cpu_seconds` is the CPU time of all
processes of a round but the caller's, imports and user code included; what hangs add to it, divided by their number, is
`cpu_ms_per_replacement`.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import report
from shardwise.config import FunctionReward, RewardConfig
from shardwise.rewards import RewardJob, Rewards

RULES = """
import time

def sleep(data_source, solution_str, ground_truth, extra_info):
    began = time.monotonic()
    if solution_str == "hang":
        time.sleep(1000)
    time.sleep(0.001)
    return {"score": time.monotonic() - began, "began": began}

def spin(data_source, solution_str, ground_truth, extra_info):
    began = time.monotonic()
    while time.monotonic() < began + (1000 if solution_str == "hang" else 0.001):
        pass
    return {"score": time.monotonic() - began, "began": began}
"""

KINDS = ("without_hangs", "one_percent_hang")


def measure(
    *, kind: str, num_jobs: int, num_hangs: int, num_workers: int, timeout_seconds: float
) -> dict[str, float | int]:
    """One round: warm processes, then all jobs in one call of `score`, the hangs spread evenly among them."""
    every = num_jobs // num_hangs if num_hangs else num_jobs + 1
    jobs = [
        RewardJob(uid=str(n), data_source="", solution_str="hang" if n % every == every - 1 else "", ground_truth="")
        for n in range(num_jobs)
    ]
    config = RewardConfig(
        functions=[FunctionReward(function=f"rules.py:{kind}")],
        num_workers=num_workers,
        timeout_seconds=timeout_seconds,
        on_failure="mask",
    )
    children_before = children_cpu_seconds()
    with Rewards(config) as rewards:
        rewards.score(jobs[: min(every - 1, 100 * num_workers)])  # all processes have imported the function
        cpu_before, began = time.process_time(), time.monotonic()
        results = rewards.score(jobs)
        seconds = time.monotonic() - began
        cpu_seconds = time.process_time() - cpu_before
    done = [(n, result) for n, result in enumerate(results) if result.failure is None]
    slot_seconds = sum(result.score for _, result in done) + num_hangs * timeout_seconds
    late = sorted(result.parts["began"] - began - n / num_jobs * seconds for n, result in done)
    assert len(results) - len(done) == num_hangs, "a call failed that should not have"
    return {
        "seconds": round(seconds, 3),
        "seconds_at_best": round(slot_seconds / num_workers, 3),
        "share_of_bound": round(slot_seconds / num_workers / seconds, 3),
        "share_of_nominal": round((len(done) * 0.001 + num_hangs * timeout_seconds) / num_workers / seconds, 3),
        "calls_per_second": round(num_jobs / seconds, 1),
        "queueing_p50_ms": round(1000 * statistics.median(late), 1),
        "queueing_p99_ms": round(1000 * late[int(0.99 * len(late))], 1),
        "queueing_max_ms": round(1000 * late[-1], 1),
        "pool_cpu_ms_per_call": round(1000 * cpu_seconds / num_jobs, 3),
        "children_cpu_seconds": round(children_cpu_seconds() - children_before, 3),
    }


def children_cpu_seconds() -> float:
    """Of those that have ended and been waited for, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kind", choices=["sleep", "spin"], default="sleep", help="what a call of 1 ms does")
    parser.add_argument("--timeout-seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    args = parser.parse_args()

    values: dict[str, Any] = {
        "settings": {
            "jobs": args.jobs,
            "kind": args.kind,
            "timeout_seconds": args.timeout_seconds,
            "rounds": args.rounds,
        }
    }
    ratios = {}
    for num_workers in args.workers:
        for name, num_hangs in zip(KINDS, (0, args.jobs // 100), strict=True):
            rounds = [
                measure(
                    kind=args.kind,
                    num_jobs=args.jobs,
                    num_hangs=num_hangs,
                    num_workers=num_workers,
                    timeout_seconds=args.timeout_seconds,
                )
                for _ in range(args.rounds)
            ]
            key = f"{name}/{num_workers}_workers"
            shares = [found["share_of_bound"] for found in rounds]
            values[key] = {
                **{field: statistics.median(found[field] for found in rounds) for field in rounds[0]},
                "share_of_bound_min": min(shares),
                "share_of_bound_max": max(shares),
            }
            ratios[key] = statistics.median(shares)
            print(key, values[key], flush=True)
        cost = [values[f"{name}/{num_workers}_workers"]["children_cpu_seconds"] for name in KINDS]
        values[f"cpu_ms_per_replacement/{num_workers}_workers"] = round(1000 * (cost[1] - cost[0]) / num_hangs, 1)
    report("rewards", ratios=ratios, memory_ratios={}, values=values, write=not args.no_write)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rules.py").write_text(RULES, encoding="utf-8")
        os.chdir(folder)
        main()
        os.chdir("/")
