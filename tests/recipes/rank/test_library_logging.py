import logging
import subprocess
import sys

from PIL import Image
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
