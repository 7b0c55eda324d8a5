"""What tests of rollout engines on the GPU ask them, and what they compare the answers with."""

from collections.abc import Sequence
from pathlib import Path

import torch
from small_gpu_model import VOCAB, packed
from torch import Tensor

from shardwise.data.packing import unpack
from shardwise.engine import TrainEngine
from shardwise.types import Completion, GenerateRequest, Sample

EOS = 1
LENGTHS = (1, 40, 7, 90, 7, 129, 2)
"""Of prompts: a single token, some of equal length, and lengths that no tile size divides."""
MAX_TOKENS = 24

Groups = Sequence[Sequence[Completion]]


def requests(*, temperature: float = 0.0, num_completions: int = 1) -> list[GenerateRequest]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    return [
        GenerateRequest(
            uid=f"{number}",
            prompt_ids=prompt,
            num_completions=num_completions,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
        )
        for number, prompt in enumerate(prompts)
    ]


def tokens(groups: Groups) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


def generated_by_transformers(folder: Path, device: torch.device) -> list[list[list[int]]]:
    """The greedy tokens of model.generate in float32, one prompt at a time."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    config = GenerationConfig(max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=EOS, pad_token_id=0)
    prompts = [torch.tensor([request.prompt_ids], device=device) for request in requests()]
    outputs = [model.generate(prompt, generation_config=config) for prompt in prompts]
    return [[output[0, prompt.shape[1] :].tolist()] for output, prompt in zip(outputs, prompts, strict=True)]


def differences(trainer: TrainEngine, wanted: Sequence[GenerateRequest], groups: Groups) -> Tensor:
    """[N]: how far the logprobs of all sampled tokens are from the trainer's at their temperature, in nats."""
    samples, sampled = [], []
    for request, group in zip(wanted, groups, strict=True):
        for completion in group:
            ids = torch.tensor(request.prompt_ids + completion.token_ids)
            is_trained = torch.arange(len(ids)) >= len(request.prompt_ids)
            samples.append(Sample(uid=request.uid, token_ids=ids, loss_mask=is_trained))
            sampled.append(torch.tensor(completion.logprobs))
    step = packed(samples, max_tokens=4096)
    outputs = trainer.forward(step.shards[0], temperature=wanted[0].temperature)
    scores = unpack(step, [[values.cpu() for output in outputs if (values := output.logprobs) is not None]])
    pairs = zip(samples, scores, sampled, strict=True)
    return torch.cat([(values[sample.loss_mask] - own).abs() for sample, values, own in pairs])
