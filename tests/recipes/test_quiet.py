import logging
import subprocess
import sys

from transformers.utils import logging as transformers_logging

from shardwise.recipes.quiet import quiet_libraries


def test_an_adapter_brings_no_words_of_libraries_about_what_is_not_used():
    """Only processors with bfloat16 units are warned; the level shows everywhere."""
    script = "from shardwise.recipes.quiet import quiet_libraries; quiet_libraries(); import peft, bitsandbytes"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""


def test_progress_bars_of_transformers_are_off_and_errors_of_bitsandbytes_are_not():
    quiet_libraries()
    assert not transformers_logging.is_progress_bar_enabled()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    assert logger.isEnabledFor(logging.ERROR)
    assert not logger.isEnabledFor(logging.WARNING)
