"""vLLM on a model folder, in lockstep: a step decodes the completions that the parent has written to a
file. Needs vllm.

The engine stays in this process, so that its CPU seconds are counted. Completions of a group are requests of their own,
as vLLM makes them of a request for several; the prompt of a group is found in the prefix cache.
"""

import argparse
import json
import os
from pathlib import Path

from benchmarks.peers.lockstep import Pacer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--round-file", type=Path, required=True, help="JSON: prompts, and lengths of completions")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--rows", type=int, required=True, help="sequences decoded at a time")
    parser.add_argument("--longest", type=int, required=True, help="tokens of a prompt and its completion")
    args = parser.parse_args()
    pacer = Pacer()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams, TokensPrompt  # reads the environment

    engine = LLM(
        model=str(args.folder),
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_num_seqs=args.rows,
        max_model_len=args.longest,
        max_num_batched_tokens=max(2048, args.longest),
        enable_prefix_caching=True,
        seed=0,
    )
    going = pacer.ready()
    while going:
        work = json.loads(args.round_file.read_text())
        outputs = engine.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in work["prompts"]],
            [
                SamplingParams(temperature=work["temperature"], max_tokens=length, ignore_eos=True, detokenize=False)
                for length in work["lengths"]
            ],
            use_tqdm=False,
        )
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        assert [len(completion) for completion in completions] == work["lengths"]
        args.round_file.with_suffix(".out").write_text(json.dumps(completions))
        engine.reset_prefix_cache()  # a round's prompts are prefilled in that round
        going = pacer.step_done(sum(work["lengths"]), 0.0)


if __name__ == "__main__":
    main()
