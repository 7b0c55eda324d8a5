"""What the quickstart makes from nothing: addition problems, a tokenizer trained on the spot, a small random model."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_NUM_PROBLEMS = 100 * 100
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
_PAD, _END = "<|pad|>", "<|end|>"
_MIN_VOCAB = 256 + len(_ROLES) + 2  # every byte, so that any text can be encoded

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ProblemFiles:
    """Where the problems were written: the same problems for both recipes, in jsonl."""

    sft_train: Path
    """Columns prompt and response."""
    sft_validation: Path
    rl_train: Path
    """Columns prompt, data_source, reward_model.ground_truth and extra_info, as verl has them."""
    rl_validation: Path


def arithmetic_problems(
    folder: str | Path, *, seed: int, num_held_out: int = 1000, worked: bool = False
) -> ProblemFiles:
    """Writes all additions of two numbers from 0 to 99 (`47+85=`), split into training and held-out problems.

    A hash of seed and problem text gives the order, and with it the split, so no rule on the operands tells the two
    sides apart. The same seed gives the same files.

    Args:
        folder: created where it is missing.
        num_held_out: problems in the validation files, 1 to 9,999; the others are in the training files.
        worked: whether responses show the work (see `worked_addition`) rather than the answer alone.
    Raises:
        ValueError: num_held_out out of range.
    """
    folder = Path(folder)
    for split, problems in _split(seed, num_held_out).items():
        _write(folder / f"sft_{split}.jsonl", (_sft_row(a, b, worked) for a, b in problems))
        _write(folder / f"rl_{split}.jsonl", (_rl_row(a, b) for a, b in problems))
    return ProblemFiles(
        sft_train=folder / "sft_train.jsonl",
        sft_validation=folder / "sft_validation.jsonl",
        rl_train=folder / "rl_train.jsonl",
        rl_validation=folder / "rl_validation.jsonl",
    )


def worked_addition(a: int, b: int) -> str:
    """Returns the sum of the ones column as two digits, which shows the carry, then the answer.

    Example: `worked_addition(47, 85) == "12 132"`
    """
    return f"{a % 10 + b % 10:02d} {a + b}"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE whose digits stay single tokens, with a chat template that is prefix-stable.

    Args:
        texts: the corpus that merges are learned from.
        vocab_size: the most tokens it may have; 261 is the bytes and the special tokens alone.
    Returns:
        a tokenizer that `AutoTokenizer.from_pretrained` reads back after `save_pretrained`.
    Raises:
        ValueError: vocab_size is too small for the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < _MIN_VOCAB:
        raise ValueError(
            f"vocab_size={vocab_size} has no room for 256 bytes and the special tokens; use {_MIN_VOCAB} up"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_PAD, _END, *_ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def build_model_folder(
    path: str | Path,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    hidden_size: int = 128,
    num_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    intermediate_size: int = 384,
    max_position_embeddings: int = 2048,
    seed: int = 0,
) -> None:
    """Saves a small random Qwen3 with tied embeddings and its tokenizer, in the Hugging Face layout.

    Args:
        path: the folder, created where it is missing.
        seed: the seed of the random weights; the global random state is left as it was.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=hidden_size // num_attention_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _split(seed: int, num_held_out: int) -> dict[str, list[tuple[int, int]]]:
    if not 0 < num_held_out < _NUM_PROBLEMS:
        raise ValueError(f"num_held_out={num_held_out} of {_NUM_PROBLEMS} problems; use 1 to {_NUM_PROBLEMS - 1}")
    pairs = sorted(((a, b) for a in range(100) for b in range(100)), key=lambda pair: _digest(seed, *pair))
    return {"validation": pairs[:num_held_out], "train": pairs[num_held_out:]}


def _digest(seed: int, a: int, b: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{a}+{b}=".encode(), digest_size=16).digest()


def _sft_row(a: int, b: int, worked: bool) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "response": worked_addition(a, b) if worked else str(a + b)}


def _rl_row(a: int, b: int) -> dict[str, Any]:
    return {
        "prompt": f"{a}+{b}=",
        "data_source": "addition",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"a": a, "b": b},
    }


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
