import logging
import subprocess
import sys
import warnings

import torch
from PIL import Image
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.utils import logging as transformers_logging

from shardwise.recipes.rank.library_logging import quiet_libraries


def test_an_adapter_brings_no_words_of_libraries_about_what_is_not_used():
    """Only processors with bfloat16 units are warned; the level shows everywhere."""
    import_quietly = "from shardwise.recipes.rank.library_logging import quiet_libraries; quiet_libraries()"
    script = f"{import_quietly}; import peft, bitsandbytes"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""


def test_an_image_that_is_refused_for_its_size_is_not_warned_of_too(tmp_path):
    Image.new("1", (10000, 9000)).save(tmp_path / "huge.png")
    script = "from shardwise.recipes.rank.library_logging import quiet_libraries; from PIL import Image; "
    for quiet in ("quiet_libraries(); ", ""):
        command = [sys.executable, "-c", f"{script}{quiet}Image.open('{tmp_path / 'huge.png'}')"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert ("DecompressionBombWarning" in done.stderr) == (not quiet)


def test_progress_bars_of_transformers_are_off_and_errors_of_bitsandbytes_are_not():
    quiet_libraries()
    assert not transformers_logging.is_progress_bar_enabled()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    assert logger.isEnabledFor(logging.ERROR)
    assert not logger.isEnabledFor(logging.WARNING)


def view_from_a_unit(is_quiet: bool) -> list[str]:
    """On a rank: what torch warns of."""

    class Tower(nn.Linear):
        def forward(self, pixels):
            return super().forward(pixels)[:1]

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if is_quiet:
            quiet_libraries()
        fully_shard(Tower(2, 2))(torch.ones(2, 2))
    return [str(one.message) for one in heard if "view" in str(one.message)]


def test_a_vision_tower_whose_states_are_a_view_is_not_warned_of(run_ranks):
    assert run_ranks(view_from_a_unit, 1, True) == [[]]
    (heard,) = run_ranks(view_from_a_unit, 1, False)
    assert len(heard) == 1
