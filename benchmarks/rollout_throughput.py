"""Sampled tokens per second: EmbeddedEngine.generate against transformers' model.generate and vLLM's CPU build.

Every side decodes completions of the same lengths: the model ends a sequence with a constant probability per token
(lengths are geometric, cut at --max-tokens, as in reinforcement learning), our side samples, and the others are held to
the lengths that came out: `generate` by a logits processor that writes one column, vLLM by max_tokens of each request.
`generate` runs batches of `--rows` with left padding, sdpa, a KV cache, do_sample over the whole vocabulary, and stops
when every row has ended. vLLM runs in a process of its own (peers/vllm_rollout.py) with as many sequences, and finds a
group's prompt in its prefix cache. Both return tokens only; ours returns logprobs too. The sides take turns, in
rotating order.

`linear_bound` is the share of the rate at which a decode step of `--rows` rows would run if it were its linear layers
alone, in the same dtype: attention, norms and sampling would take no time, and no row would ever be missing.

vLLM runs where it is installed: in --peer-python (see peers/requirements-vllm.txt). Without it that ratio is left out.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel, Qwen3ForCausalLM

from benchmarks.harness import paired_ratios, report, small_qwen3
from benchmarks.peers.lockstep import Child
from shardwise.rollout import EmbeddedEngine
from shardwise.types import Completion, GenerateRequest

PAD, EOS, FIRST_TOKEN = 0, 1, 2
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 48
CPU = torch.device("cpu")

MODELS = {
    "4M": {"vocab_size": 4096},
    "30M": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
"""Sizes for small_qwen3: 4.2M and 29.4M parameters, embeddings (tied) included."""


@dataclass(frozen=True, slots=True)
class Workload:
    """How many completions of how many prompts, and whether they end on their own."""

    num_prompts: int
    group_size: int
    ragged: bool


WORKLOADS = {
    "groups_of_8": Workload(8, 8, ragged=True),
    "groups_of_16": Workload(4, 16, ragged=True),
    "refilled": Workload(32, 8, ragged=True),
    "equal": Workload(8, 8, ragged=False),
}
"""The headline is groups_of_8 and groups_of_16, one batch of 64. `refilled` is four batches, so that the places of
finished rows are taken; `equal` never ends early, which is where continuous batching gains nothing."""


def build_model(
    folder: Path, *, mean_tokens: float | None, seed: int = 0, vocab_size: int = 4096, **larger: int
) -> None:
    """Saves a random Qwen3 that ends a sequence with probability 1 / mean_tokens at each token.

    Hidden dimension 0 is the same number at every token, and only the row of EOS in the (tied) output projection
    reads it strongly, so the logit of EOS is near constant. None never ends.

    Args:
        larger: sizes for small_qwen3.
    """
    config = small_qwen3(vocab_size, **larger)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).eval()
    embedding = model.get_input_embeddings().weight
    with torch.inference_mode():
        for layer in model.model.layers:  # nothing adds to dimension 0
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        embedding[:, 0] = 0.1
        embedding[EOS] = 0
        tokens = torch.randint(FIRST_TOKEN, config.vocab_size, (16, 64))
        hidden = model.model(input_ids=tokens).last_hidden_state
        others = model.lm_head(hidden)[..., FIRST_TOKEN:].logsumexp(-1).mean()
        odds = -30.0 if mean_tokens is None else float(torch.logit(torch.tensor(1 / mean_tokens)))
        embedding[EOS, 0] = (others + odds) / hidden[..., 0].mean()
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)


def requests_of(workload: Workload, *, seed: int, max_tokens: int, temperature: float = 1.0) -> list[GenerateRequest]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(SHORTEST_PROMPT, LONGEST_PROMPT + 1, (workload.num_prompts,), generator=generator).tolist()
    return [
        GenerateRequest(
            uid=str(index),
            prompt_ids=torch.randint(FIRST_TOKEN, 4096, (length,), generator=generator).tolist(),
            num_completions=workload.group_size,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        for index, length in enumerate(lengths)
    ]


class EndAt(LogitsProcessor):
    """Ends row i after lengths[i] tokens, not before; rows as long as the cap never end."""

    def __init__(self, lengths: Tensor, prompt_tokens: int, max_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._rows_ending_at = [(lengths == step).nonzero()[:, 0] for step in range(1, max_tokens)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, EOS] = float("-inf")
        step = input_ids.shape[1] - self._prompt_tokens
        if step < len(self._rows_ending_at) and len(rows := self._rows_ending_at[step]):
            scores[rows, EOS] = float("inf")
            scores[rows] = torch.where(scores[rows] == float("inf"), 0.0, float("-inf")).to(scores.dtype)
        return scores


def hf_generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int] | None,
    *,
    max_tokens: int,
    do_sample: bool,
) -> Tensor:
    """[B, up to max_tokens]: one batch of model.generate, a row for each prompt."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    processors = [] if lengths is None else [EndAt(torch.tensor(lengths), width, max_tokens)]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {"do_sample": False}
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            use_cache=True,
            logits_processor=processors,
            **sampling,
        )
    return output[:, width:]


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens over the seconds of the clock and of the CPU; the second hardly depends on what else the machine does."""

    per_second: float
    per_cpu_second: float


def timed(run: Callable[[], int]) -> Rate:
    gc.collect()
    start, start_cpu = time.perf_counter(), time.process_time()
    tokens = run()
    return Rate(tokens / (time.perf_counter() - start), tokens / (time.process_time() - start_cpu))


@dataclass(frozen=True, slots=True)
class Round:
    """What every side decodes."""

    requests: list[GenerateRequest]
    lengths: list[int]
    """Of the completions, in the order of the requests."""

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of each completion."""
        return [list(request.prompt_ids) for request in self.requests for _ in range(request.num_completions)]


Side = Callable[[Round], Rate]


class Ours:
    """The embedded engine, which draws the lengths."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, rows: int, compile_decode: bool) -> None:
        self.engine = EmbeddedEngine.from_folder(
            folder, dtype=dtype, max_rows=rows, device=CPU, compile_decode=compile_decode
        )

    def draw(self, workload: Workload, *, seed: int, max_tokens: int) -> Round:
        requests = requests_of(workload, seed=seed, max_tokens=max_tokens)
        return Round(requests, [len(c.token_ids) for group in self.engine.generate(requests) for c in group])

    def __call__(self, round: Round) -> Rate:
        return timed(lambda: sum(len(c.token_ids) for group in self.engine.generate(round.requests) for c in group))


class Generate:
    """model.generate."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, rows: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
        self._rows = rows

    def __call__(self, round: Round) -> Rate:
        max_tokens = round.requests[0].max_tokens

        def run() -> int:
            total = 0
            for first in range(0, len(round.lengths), self._rows):
                part = slice(first, first + self._rows)
                output = hf_generate(
                    self.model, round.prompts[part], round.lengths[part], max_tokens=max_tokens, do_sample=True
                )
                total += sum(length_until_eos(row) for row in output.tolist())
            assert total == sum(round.lengths)
            return total

        return timed(run)


class VLLM:
    """vLLM's CPU build, in a process of its own."""

    def __init__(self, python: str, folder: Path, dtype: str, *, rows: int, longest: int, threads: int) -> None:
        self._round_file = folder / "round.json"
        arguments = ["--folder", folder, "--round-file", self._round_file, "--dtype", dtype, "--rows", rows]
        self._child = Child(
            python,
            "benchmarks.peers.vllm_rollout",
            [str(argument) for argument in [*arguments, "--longest", longest]],
            threads=threads,
        )

    def __call__(self, round: Round) -> Rate:
        temperature = round.requests[0].temperature
        work = {"prompts": round.prompts, "lengths": round.lengths, "temperature": temperature}
        self._round_file.write_text(json.dumps(work))
        answer = self._child.steps(1)
        return Rate(answer["tokens"] / answer["seconds"], answer["tokens"] / answer["cpu_seconds"])

    def finish(self) -> None:
        self._child.finish()


class LinearLayers:
    """A decode step that is its linear layers alone."""

    def __init__(self, model: PreTrainedModel, *, rows: int) -> None:
        self._linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        self._inputs = {
            size: torch.randn(rows, size, dtype=model.dtype) for size in {m.in_features for m in self._linears}
        }
        self._rows = rows

    @torch.inference_mode()
    def __call__(self, _round: Round) -> Rate:
        def steps(count: int) -> int:
            for _ in range(count):
                for module in self._linears:
                    module(self._inputs[module.in_features])
            return count * self._rows

        steps(5)
        return timed(lambda: steps(60))


def length_until_eos(row: list[int]) -> int:
    return row.index(EOS) + 1 if EOS in row else len(row)


@torch.inference_mode()
def check_equal(ours: Ours, generate: Generate) -> dict[str, float]:
    """Greedy tokens equal those of generate, and the engine's logprobs equal those of a plain padding-free forward.

    Greedy tokens may part where two logits tie within rounding; in float32 they do not.

    Returns:
        The share of equal greedy tokens, and the largest and mean difference of logprobs in nats.
    Raises:
        SystemExit: they are not equal in float32, or logprobs are further apart than rounding in this dtype.
    """
    requests = requests_of(Workload(8, 1, ragged=True), seed=99, max_tokens=64, temperature=0.0)
    greedy = [group[0].token_ids for group in ours.engine.generate(requests)]
    output = hf_generate(generate.model, [r.prompt_ids for r in requests], None, max_tokens=64, do_sample=False)
    expected = [row[: length_until_eos(row)] for row in output.tolist()]
    equal = sum(
        a == b for mine, theirs in zip(greedy, expected, strict=True) for a, b in zip(mine, theirs, strict=False)
    )
    drawn = requests_of(Workload(4, 4, ragged=True), seed=98, max_tokens=64)
    differences = torch.cat(
        [
            (
                torch.tensor(completion.logprobs) - reference_logprobs(generate.model, request.prompt_ids, completion)
            ).abs()
            for request, group in zip(drawn, ours.engine.generate(drawn), strict=True)
            for completion in group
        ]
    )
    found = {
        "greedy_equal_share": equal / sum(map(len, expected)),
        "logprob_max_difference": float(differences.max()),
        "logprob_mean_difference": float(differences.mean()),
    }
    exact = generate.model.dtype == torch.float32
    if found["logprob_mean_difference"] > (1e-5 if exact else 5e-3) or (exact and greedy != expected):
        raise SystemExit(f"the engine does not compute what the model does, in {generate.model.dtype}: {found}")
    return found


def reference_logprobs(model: PreTrainedModel, prompt: list[int], completion: Completion) -> Tensor:
    """[N] float32, one forward pass over one sequence; the head in float32, as both ours and the trainer compute it."""
    tokens = torch.tensor([prompt + completion.token_ids])
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    logits = hidden.float() @ model.get_output_embeddings().weight.float().t()
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]


def measure(
    sides: Mapping[str, Side], ours: Ours, workload: Workload, *, rounds: int, max_tokens: int
) -> tuple[dict[str, float], dict[str, object]]:
    """Runs the sides in turns, in rotating order, on new prompts and lengths every round.

    Returns:
        The ratio of ours to every other side, and everything that was measured.
    """
    names = list(sides)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    lengths = []
    for seed in range(rounds + 1):  # the first round is the warm-up
        drawn = ours.draw(workload, seed=seed, max_tokens=max_tokens)
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            rate = sides[name](drawn)
            if seed:
                wall[name].append(rate.per_second)
                cpu[name].append(rate.per_cpu_second)
        lengths += drawn.lengths if seed else []
    peers = [name for name in names if name != "ours"]
    found = {name: paired_ratios(wall["ours"], wall[name]) for name in peers}
    return {name: ratio["median"] for name, ratio in found.items()}, {
        "ratios": found,
        "cpu_ratios": {name: paired_ratios(cpu["ours"], cpu[name]) for name in peers},
        "tokens_per_second": {name: round(statistics.median(rates)) for name, rates in wall.items()},
        "tokens_per_cpu_second": {name: round(statistics.median(rates)) for name, rates in cpu.items()},
        "mean_length": round(statistics.mean(lengths), 1),
        "longest": max(lengths),
    }


def measure_model(
    size: str, dtype: str, folder: Path, args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, object]]:
    """Every workload on one model in one dtype, after the check that the sides compute the same."""
    ending, endless = folder / "ending", folder / "endless"
    build_model(ending, mean_tokens=args.mean_tokens, **MODELS[size])
    build_model(endless, mean_tokens=None, **MODELS[size])
    torch_dtype = getattr(torch, dtype)
    ours = {
        path: Ours(path, torch_dtype, rows=args.rows, compile_decode=args.compile_decode) for path in (ending, endless)
    }
    generate = Generate(ending, torch_dtype, rows=args.rows)
    linear = LinearLayers(generate.model, rows=args.rows)
    values: dict[str, object] = {"agreement": check_equal(ours[ending], generate)}
    ratios: dict[str, float] = {}
    vllm = None
    if args.peer_python and dtype == "bfloat16":
        longest = LONGEST_PROMPT + args.max_tokens
        vllm = VLLM(args.peer_python, ending, dtype, rows=args.rows, longest=longest, threads=args.threads)
    for name in args.workloads:
        workload = WORKLOADS[name]
        mine = ours[ending if workload.ragged else endless]
        sides: dict[str, Side] = {"ours": mine, "generate": generate, "linear_bound": linear}
        if vllm is not None:
            sides["vllm"] = vllm
        found, values[name] = measure(sides, mine, workload, rounds=args.rounds, max_tokens=args.max_tokens)
        ratios |= {f"{side}/{size}/{dtype}/{name}": ratio for side, ratio in found.items()}
        print(size, dtype, name, values[name], flush=True)
    if vllm is not None:
        vllm.finish()
    return ratios, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--peer-python", help="the interpreter that has vllm; without it vLLM is left out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64, help="sequences decoded at a time, on every side")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--mean-tokens", type=float, default=128.0, help="mean length if nothing were cut")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile-decode", action="store_true", help="on our side; vLLM always compiles")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], help="bfloat16, float32")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    ratios: dict[str, float] = {}
    values: dict[str, object] = {
        "settings": {
            "models": "Qwen3: 4.2M parameters (hidden 256, 4 layers, vocab 4096), 29.4M (512, 8, 8192), tied",
            "rows": args.rows,
            "prompt_tokens": f"{SHORTEST_PROMPT}-{LONGEST_PROMPT}",
            "max_tokens": args.max_tokens,
            "mean_tokens_uncut": args.mean_tokens,
            "threads": args.threads,
            "rounds": args.rounds,
            "compile_decode": args.compile_decode,
        }
    }
    for size in args.models:
        for dtype in args.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                found, values[f"{size}/{dtype}"] = measure_model(size, dtype, Path(folder), args)
            ratios |= found
    for side in ("generate", "vllm"):
        headline = [ratio for key, ratio in ratios.items() if key.startswith(f"{side}/") and "groups_of" in key]
        ratios = ({side: min(headline)} if headline else {}) | ratios
    report("rollout_throughput", ratios=ratios, memory_ratios={}, values=values, write=not args.no_write)


if __name__ == "__main__":
    main()
