"""Silences libraries that print or warn between the lines of the run's own output."""

import logging
import warnings

from transformers.utils.logging import disable_progress_bar

_KERNELS_OF_BITSANDBYTES = "bitsandbytes.backends.cpu.ops"
"""Logger that warns of kernels that nothing here uses when bitsandbytes is imported, which peft does for every
adapter."""

_SIZE_OF_AN_IMAGE = "Image size .* exceeds limit"
"""pillow's warning of images that data/images.py refuses."""

_VIEW_OF_A_UNIT = "FSDP2-wrapped module .* returned a view tensor"
"""torch's warning against changing the last states of GLM's vision tower, or of LLaVA's projector, in place, which
nothing does."""


def quiet_libraries() -> None:
    """Turns off the libraries' progress bars, and warnings that do not apply."""
    disable_progress_bar()
    warnings.filterwarnings("ignore", _SIZE_OF_AN_IMAGE)
    warnings.filterwarnings("ignore", _VIEW_OF_A_UNIT)
    logging.getLogger(_KERNELS_OF_BITSANDBYTES).setLevel(logging.ERROR)
