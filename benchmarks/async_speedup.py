"""Steps per second of the pipeline of rollouts, ahead of training against in turn with it, with simulated durations.

The pipeline is the product's own, thread and all; sampling and training are sleeps. What overlapping can gain is
bounded by (T_gen + T_train) / max(T_gen, T_train); the ratios are of the same durations in the same order, run next to
each other. Of the durations, `even` takes as long to sample as to train (the bound is 2), `generation` takes 70 % of a
step to sample, and `ragged` varies with a log-normal factor of sigma 0.4 from step to step, where a bound of more than
one version on staleness lets sampling run ahead of slow steps.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness import paired_ratios, report
from shardwise.config import PromptDataConfig
from shardwise.data import PromptStream
from shardwise.recipes.sampling.pipeline import Pipeline
from shardwise.recipes.sampling.sampler import Rollout
from shardwise.types import Completion, Example, RolloutGroup

EXAMPLE = Example(uid="row", prompt_ids=[1], prompt="", data_source="", ground_truth=None)


@dataclass(frozen=True, slots=True)
class Durations:
    """Of each step, in seconds."""

    sampling: Sequence[float]
    training: Sequence[float]

    @classmethod
    def drawn(cls, num_steps: int, *, share: float, sigma: float, step_seconds: float, seed: int) -> "Durations":
        """
        Args:
            share: of sampling, in a step of `step_seconds` on the average.
            sigma: of the logarithm of each factor, whose mean is 1.
        """
        draws = random.Random(seed)

        def around(mean: float) -> Iterator[float]:
            return (mean * draws.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(num_steps))

        return cls([*around(share * step_seconds)], [*around((1 - share) * step_seconds)])

    @property
    def bound(self) -> float:
        """What overlapping all of the shorter part would gain."""
        sampling, training = sum(self.sampling), sum(self.training)
        return (sampling + training) / max(sampling, training)


class SleepingSampler:
    """Takes as long as its durations say, and gives a completion of the version that is served."""

    examples = (EXAMPLE,)

    def __init__(self, durations: Durations) -> None:
        self._durations = durations
        self.version = 0

    def collect(self, step: int) -> Rollout:
        version = self.version
        time.sleep(self._durations.sampling[step - 1])
        completion = Completion(token_ids=[1], logprobs=[0.0], finish_reason="stop", policy_version=version)
        group = RolloutGroup(
            example=EXAMPLE,
            completions=[completion],
            texts=[""],
            answers=[""],
            rewards=[0.0],
            reward_parts=[{}],
            failures=[None],
        )
        return Rollout(groups=[group], greedy_rewards=None, metrics={})


def run(durations: Durations, *, max_staleness: int | None) -> tuple[float, float]:
    """Returns steps per second, and the mean staleness."""
    num_steps = len(durations.training)
    sampler = SleepingSampler(durations)
    stream = PromptStream([""], PromptDataConfig(), seed=0)
    staleness = []
    start = time.perf_counter()
    with Pipeline(sampler, stream, total_steps=num_steps, max_staleness=max_staleness) as pipeline:  # type: ignore[arg-type]
        pipeline.start(1)
        for step in range(1, num_steps + 1):
            sampled_by = pipeline.take(step).oldest_version
            assert sampled_by is not None
            staleness.append(step - 1 - sampled_by)
            time.sleep(durations.training[step - 1])
            if pipeline.takes_weights():
                with pipeline.serving(step, samples=False):
                    sampler.version = step
    return num_steps / (time.perf_counter() - start), statistics.mean(staleness)


CASES = {"even": (0.5, 0.0), "generation": (0.7, 0.0), "ragged": (0.5, 0.4)}
"""Of each case: sampling's share of a step, and sigma."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    args = parser.parse_args()
    ratios: dict[str, float] = {}
    values: dict[str, object] = {"settings": {"steps": args.steps, "seconds_per_step_in_turn": args.step_seconds}}
    for case, (share, sigma) in CASES.items():
        rates: dict[int | None, list[float]] = {None: [], 1: [], 3: []}
        ages: dict[int | None, float] = {}
        bounds = []
        for seed in range(args.rounds):
            durations = Durations.drawn(args.steps, share=share, sigma=sigma, step_seconds=args.step_seconds, seed=seed)
            bounds.append(durations.bound)
            for bound, found in rates.items():
                rate, ages[bound] = run(durations, max_staleness=bound)
                found.append(rate)
        for bound in (1, 3):
            ratio = paired_ratios(rates[bound], rates[None])
            ratios[f"{case}/max_staleness_{bound}"] = ratio["median"]
            values[f"{case}/max_staleness_{bound}"] = {"ratio": ratio, "mean_staleness": round(ages[bound], 2)}
        values[f"{case}/bound"] = round(statistics.median(bounds), 3)
        print(case, {name: ratio for name, ratio in ratios.items() if name.startswith(case)}, flush=True)
    ratios = {"in_turn": ratios["even/max_staleness_1"], **ratios}
    report("async_speedup", ratios=ratios, memory_ratios={}, values=values, write=not args.no_write)


if __name__ == "__main__":
    main()
