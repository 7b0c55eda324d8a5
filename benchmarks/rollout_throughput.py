"""Sampled tokens per second: EmbeddedEngine.generate against transformers' model.generate.

Both sides decode completions of the same lengths: the model ends a sequence with a constant probability per token
(lengths are geometric, cut at --max-tokens, as in reinforcement learning), our side samples, and `generate` is held to
the lengths that came out, by a logits processor that writes one column. `generate` runs batches of `--rows` with left
padding, sdpa, a KV cache, do_sample over the whole vocabulary, and stops when every row has ended. It returns tokens
only; ours returns logprobs too.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel, Qwen3ForCausalLM

from benchmarks.harness import paired_ratios, report, small_qwen3
from shardwise.rollout import EmbeddedEngine
from shardwise.types import Completion, GenerateRequest

PAD, EOS, FIRST_TOKEN = 0, 1, 2
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Workload:
    """How many completions of how many prompts, and whether they end on their own."""

    num_prompts: int
    group_size: int
    ragged: bool


WORKLOADS = {
    "ragged_64": Workload(8, 8, ragged=True),
    "ragged_256": Workload(32, 8, ragged=True),
    "equal_64": Workload(8, 8, ragged=False),
}
"""The headline is ragged_64; `equal_64` never ends early, which is where continuous batching gains nothing."""


def build_model(folder: Path, *, mean_tokens: float | None, seed: int = 0) -> None:
    """Saves a random Qwen3 of 4.2M parameters that ends a sequence with probability 1 / mean_tokens at each token.

    Hidden dimension 0 is the same number at every token, and only the row of EOS in the (tied) output projection
    reads it strongly, so the logit of EOS is near constant. None never ends.
    """
    config = small_qwen3(4096)
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
    """Prompts of 16 to 48 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(16, 49, (workload.num_prompts,), generator=generator).tolist()
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


def timed(run: Callable[[], int]) -> tuple[int, Rate]:
    gc.collect()
    start, start_cpu = time.perf_counter(), time.process_time()
    tokens = run()
    return tokens, Rate(tokens / (time.perf_counter() - start), tokens / (time.process_time() - start_cpu))


class Pair:
    """The two sides on one model folder in one dtype."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, rows: int, max_tokens: int) -> None:
        self.rows, self.max_tokens = rows, max_tokens
        self.engine = EmbeddedEngine.from_folder(folder, dtype=dtype, max_rows=rows, device=CPU)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()

    def round(self, workload: Workload, seed: int, *, ours_first: bool) -> tuple[Rate, Rate, list[int]]:
        """The rates of ours and of generate on the same prompts and lengths, and the lengths."""
        requests = requests_of(workload, seed=seed, max_tokens=self.max_tokens)
        lengths: list[int] = []

        def ours() -> int:
            groups = self.engine.generate(requests)
            lengths[:] = [len(completion.token_ids) for group in groups for completion in group]
            return sum(lengths)

        def theirs() -> int:
            prompts = [request.prompt_ids for request in requests for _ in range(request.num_completions)]
            total = 0
            for first in range(0, len(prompts), self.rows):
                part = slice(first, first + self.rows)
                output = hf_generate(
                    self.model, prompts[part], lengths[part], max_tokens=self.max_tokens, do_sample=True
                )
                total += sum(length_until_eos(row) for row in output.tolist())
            return total

        if not ours_first:
            ours()  # untimed: generate needs the lengths
            their_tokens, their_rate = timed(theirs)
            our_tokens, our_rate = timed(ours)
        else:
            our_tokens, our_rate = timed(ours)
            their_tokens, their_rate = timed(theirs)
        assert our_tokens == their_tokens, f"ours sampled {our_tokens} tokens, generate {their_tokens}"
        return our_rate, their_rate, lengths.copy()


def length_until_eos(row: list[int]) -> int:
    return row.index(EOS) + 1 if EOS in row else len(row)


@torch.inference_mode()
def check_equal(pair: Pair) -> dict[str, float]:
    """Greedy tokens equal those of generate, and the engine's logprobs equal those of a plain padding-free forward.

    Greedy tokens may part where two logits tie within rounding; in float32 they do not.

    Returns:
        The share of equal greedy tokens, and the largest and mean difference of logprobs in nats.
    """
    requests = requests_of(Workload(8, 1, ragged=True), seed=99, max_tokens=64, temperature=0.0)
    greedy = [group[0].token_ids for group in pair.engine.generate(requests)]
    output = hf_generate(pair.model, [r.prompt_ids for r in requests], None, max_tokens=64, do_sample=False)
    expected = [row[: length_until_eos(row)] for row in output.tolist()]
    equal = sum(
        a == b for mine, theirs in zip(greedy, expected, strict=True) for a, b in zip(mine, theirs, strict=False)
    )
    sampled = pair.engine.generate(requests_of(Workload(4, 4, ragged=True), seed=98, max_tokens=64))
    prompts = [r.prompt_ids for r in requests_of(Workload(4, 4, ragged=True), seed=98, max_tokens=64)]
    differences = torch.cat(
        [
            (torch.tensor(completion.logprobs) - reference_logprobs(pair.model, prompt, completion)).abs()
            for prompt, group in zip(prompts, sampled, strict=True)
            for completion in group
        ]
    )
    return {
        "greedy_equal_share": equal / sum(map(len, expected)),
        "logprob_max_difference": float(differences.max()),
        "logprob_mean_difference": float(differences.mean()),
    }


def reference_logprobs(model: PreTrainedModel, prompt: list[int], completion: Completion) -> Tensor:
    """[N] float32, one forward pass over one sequence; the head in float32, as both ours and the trainer compute it."""
    tokens = torch.tensor([prompt + completion.token_ids])
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    logits = hidden.float() @ model.get_output_embeddings().weight.float().t()
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]


@torch.inference_mode()
def linear_layers_bound(model: PreTrainedModel, rows: int) -> float:
    """Tokens per second if a decode step of `rows` were its linear layers alone, in this dtype."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {id(m): torch.randn(rows, m.in_features, dtype=m.weight.dtype) for m in linears}

    def step() -> None:
        for module in linears:
            module(inputs[id(module)])

    for _ in range(5):
        step()
    seconds = []
    for _ in range(30):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return rows / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64, help="sequences decoded at a time, on both sides")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--mean-tokens", type=float, default=128.0, help="mean length if nothing were cut")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    ratios: dict[str, float] = {}
    values: dict[str, object] = {
        "settings": {
            "model": "Qwen3, 4.2M parameters, hidden 256, 4 layers, vocab 4096, tied",
            "rows": args.rows,
            "prompt_tokens": "16-48",
            "max_tokens": args.max_tokens,
            "mean_tokens_uncut": args.mean_tokens,
            "threads": args.threads,
        }
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = {True: Path(folder) / "ragged", False: Path(folder) / "equal"}
        build_model(paths[True], mean_tokens=args.mean_tokens)
        build_model(paths[False], mean_tokens=None)
        for dtype in args.dtypes:
            pairs = {
                ragged: Pair(path, getattr(torch, dtype), rows=args.rows, max_tokens=args.max_tokens)
                for ragged, path in paths.items()
            }
            values[f"equal/{dtype}"] = check_equal(pairs[True])
            values[f"linear_layers_bound/{dtype}"] = round(linear_layers_bound(pairs[True].model, args.rows))
            for name in args.workloads:
                key = f"generate/{dtype}/{name}"
                ratios[key], values[key] = measure(pairs, WORKLOADS[name], rounds=args.rounds)
                print(key, ratios[key], values[key], flush=True)
    headline = [ratios[f"generate/{dtype}/ragged_64"] for dtype in args.dtypes if "ragged_64" in args.workloads]
    if headline:
        ratios = {"generate": min(headline), **ratios}
    report("rollout_throughput", ratios=ratios, memory_ratios={}, values=values, write=not args.no_write)


def measure(pairs: dict[bool, Pair], workload: Workload, *, rounds: int) -> tuple[float, dict[str, object]]:
    pair = pairs[workload.ragged]
    pair.round(workload, seed=0, ours_first=True)  # warm-up
    ours, theirs, lengths = [], [], []
    cpu_ours, cpu_theirs = [], []
    for seed in range(1, rounds + 1):
        mine, peer, drawn = pair.round(workload, seed=seed, ours_first=seed % 2 == 1)
        ours.append(mine.per_second)
        theirs.append(peer.per_second)
        cpu_ours.append(mine.per_cpu_second)
        cpu_theirs.append(peer.per_cpu_second)
        lengths += drawn
    ratio = paired_ratios(ours, theirs)
    return ratio["median"], {
        "ratio": ratio,
        "cpu_ratio": paired_ratios(cpu_ours, cpu_theirs),
        "ours_tokens_per_second": round(statistics.median(ours)),
        "generate_tokens_per_second": round(statistics.median(theirs)),
        "mean_length": round(statistics.mean(lengths), 1),
        "longest": max(lengths),
    }


if __name__ == "__main__":
    main()
