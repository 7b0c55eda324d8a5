"""`make models`: proves every family of family_table.py, check by check; writes the record that the package reads, and
its page docs/models.md. Arguments: the families to prove anew, the others keep their rows; none: all."""

import json
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from family_checks import NO_EXPERTS, Proof
from family_table import FAMILIES, REFUSED
from ranks import RankError, RankPool
from transformers.utils.logging import disable_progress_bar

from shardwise import families
from shardwise.families import CHECKS, PROVEN, other_release, proven_record
from shardwise.families.proven import RECORD_NAME

ROOT = Path(__file__).parents[1]
RECORD = Path(families.__file__).with_name(RECORD_NAME)
VLLM_RECORD = ROOT / "tests" / "vllm_families.json"
PAGE = ROOT / "docs" / "models.md"


def page(record: Mapping[str, Mapping[str, str]], release: str) -> str:
    """Markdown. `release`: of transformers."""
    proven = {family: row for family, row in record.items() if row["packing"] == PROVEN}
    lines = [
        "# Models",
        "",
        f"Made by `make models` with transformers {release}, from `shardwise/families/proven.json`: the",
        "record that engines read before they load a model. Of every family a tiny random model is compared with plain",
        "transformers, all in float32 on a CPU: that the same is computed, not how another dtype or device rounds it.",
        f"{len(proven)} families are proven; of those below them every engine says why it refuses them.",
        "",
        "Whatever is not proven here is an error that names what is, unless `engine.allow_unproven=true` (training) or",
        "`rollout.engine.allow_unproven=true` (the embedded engine) asks for it. With another release of transformers",
        "a run warns, an error names both, and `make models` proves the families anew.",
        "",
        "Families with a vision tower read text here; [vision.md](vision.md) says what is proven of them with images.",
        f"Whole checkpoints of {_listed(_wrappers(proven))} are not supported:",
        "beside the language model, which is proven by its own name with `_text`, they have other models. Of `llama4`",
        "`AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)` writes the language model alone.",
        "",
        f"A dash stands where the configuration that was proven {NO_EXPERTS}.",
        "`zamba2` is proven with one layer for a block; where several share one, as is its idea, it is refused.",
        "",
        *(f"- **{check}**: {words}" for check, words in MEANING.items()),
        "",
        "| family | " + " | ".join(CHECKS) + " |",
        "|---|" + "---|" * len(CHECKS),
    ]
    reasons: list[str] = []
    for family, row in sorted(proven.items()):
        cells = [_cell(row[check].removesuffix(f" of the family {family}"), reasons) for check in CHECKS]
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    lines += ["", "## Refused families", "", "| family | reason |", "|---|---|"]
    lines += [f"| `{family}` | {row['packing']} |" for family, row in sorted(record.items()) if family not in proven]
    return "\n".join([*lines, *_of_vllm()]) + "\n"


def vllm_record() -> Mapping[str, Any]:
    """What prove_vllm_models.py found: under `families` the rows, and the releases of `vllm` and `transformers`."""
    record: dict[str, Any] = json.loads(VLLM_RECORD.read_text(encoding="utf-8"))
    return record


def _of_vllm() -> list[str]:
    """The section on what it serves."""
    record = vllm_record()
    rows = sorted(record["families"].items())
    served = [family for family, row in rows if row["vllm"] == PROVEN]
    reasons: list[str] = []
    table = []
    for family, row in rows:
        cells = [_cell(row[check], reasons) for check in MEANING_OF_VLLM]
        table.append(f"| `{family}` | {' | '.join(cells)} | {row.get('lacks', '')} |")
    return [
        "",
        "## What vLLM serves",
        "",
        f"Made by `make models-vllm` with vLLM {record['vllm']}, its CPU build, and transformers",
        f"{record['transformers']}, from `tests/vllm_families.json`. Engines do not read it: a run of a family that",
        "vLLM does not serve right ends at the start, or with its first weight sync, whose probe names the logprobs of",
        f"both sides (`rollout.probe_every_syncs`). Of {len(rows)} families {len(served)} are served right. Their tiny",
        "random models, in float32, have heads as wide as vLLM's kernels want them; prompts are text.",
        "Families that the table does not have were not compared: most whole checkpoints with a tower.",
        "",
        *(f"- **{check}**: {words}" for check, words in MEANING_OF_VLLM.items()),
        f"- **without**: {WITHOUT}",
        "",
        f"| family | {' | '.join(MEANING_OF_VLLM)} | without |",
        "|---|" + "---|" * len(MEANING_OF_VLLM) + "---|",
        *table,
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
    ]


def _wrappers(proven: Collection[str]) -> list[str]:
    """Families whose language model is proven alone."""
    bare = (family.removesuffix("_text") for family in proven if family.endswith("_text"))
    return sorted(family for family in bare if family not in proven)


def _listed(names: Sequence[str]) -> str:
    *others, last = (f"`{name}`" for name in names)
    return f"{', '.join(others)} or {last}"


MEANING = {
    "packing": "logprobs and gradients of packed sequences are those of each sequence alone",
    "fsdp2": "a step on two ranks, logprobs, gradients and weights after it, is that of one process",
    "export": "what two ranks write is what `save_pretrained` writes, bit for bit",
    "ulysses": "the same step with every sequence on both ranks",
    "expert_parallel": "the same step with the experts of every layer split over both ranks",
    "checkpointing_full": "gradients with `activation_checkpointing: full` are those without",
    "checkpointing_selective": "likewise with `selective` by operation: attention and every second matrix product are "
    "kept, whatever a layer then changes in place",
    "lora": "an adapter on all linear layers: off, the model is its base bit for bit; peft loads what is written and "
    "gives the engine's logprobs, and so does transformers with the merged model",
    "lora_experts": "the same on two ranks with an adapter for every fused expert beside them; logprobs after a step, "
    "and the gradients of the next, are those of one process",
    "qlora": "an adapter on linear layers in 4 bits: the merged model that is written gives the engine's logprobs",
    "token_values": "a new value head gives values of the language model's states, a saved one those of "
    "`AutoModelForTokenClassification`, and after a step transformers those of the engine; with the code beside the "
    "weights where transformers has no class",
    "sequence_scores": "likewise a score head and `AutoModelForSequenceClassification`",
    "embedded": "greedy tokens are those of `model.generate`, and logprobs the trainer's",
}

MEANING_OF_VLLM = {
    "vllm": "an engine with other weights gives the trainer's logprobs after a sync, greedily and at temperature 1, "
    "and again after that of a step",
    "vllm_lora": "an engine with the base likewise, after the sync of an adapter on all linear layers alone",
    "vllm_ranks": "two ranks that train are one engine (`tensor_parallel_size: 2`); they are sent what each needs, and "
    "each gives the trainer's logprobs",
}
WITHOUT = "what was left out of the family's config, because vLLM refuses it or computes it otherwise"


def _cell(result: str, reasons: list[str]) -> str:
    if result in (PROVEN, NO_EXPERTS):
        return "yes" if result == PROVEN else "–"
    if result not in reasons:
        reasons.append(result)
    return f"no ({reasons.index(result) + 1})"


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    if chosen and (note := other_release()):
        sys.exit(f"{note}: prove all families, not {', '.join(chosen)} alone")
    record = {family: row for family, row in proven_record().items() if family in {*FAMILIES, *REFUSED}}
    write(record)  # with this release, which refusals would else name beside the one before
    pool = RankPool()
    run_ranks = partial(pool.run, timeout_seconds=600)  # a busy machine proves nothing of a family
    for family in chosen or [*FAMILIES, *REFUSED]:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                proof = Proof(family, Path(scratch))
                row = proof.on_one_rank(run_ranks)
                if row["packing"] == PROVEN:
                    row |= proof.on_two_ranks(run_ranks)
            except RankError as error:
                row = {"packing": f"fails: {str(error).strip().splitlines()[-1]}"}
                print(error, flush=True)
        record[family] = row if row["packing"] == PROVEN else {"packing": row["packing"]}
        print("==", family, {check: result for check, result in record[family].items() if result != PROVEN}, flush=True)
        write(record)
    pool.close()
    PAGE.write_text(page(record, transformers.__version__), encoding="utf-8")


def write(record: Mapping[str, Mapping[str, str]]) -> None:
    whole = {"families": record, "transformers": transformers.__version__}
    RECORD.write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
