"""What the libraries of a run say about themselves beside what the run says."""

import logging
import warnings

from transformers.utils.logging import disable_progress_bar

_KERNELS_OF_BITSANDBYTES = "bitsandbytes.backends.cpu.ops"
"""It warns when it is imported, which peft does for every adapter: of kernels that nothing here asks for."""

_SIZE_OF_AN_IMAGE = "Image size .* exceeds limit"
"""pillow warns of images that data/images.py refuses."""

_VIEW_OF_A_UNIT = "FSDP2-wrapped module .* returned a view tensor"
"""torch warns of the last states of GLM's vision tower, in case somebody changes them in place; nobody does."""


def quiet_libraries() -> None:
    """No progress bars but ours, and no warning of what is not used."""
    disable_progress_bar()
    warnings.filterwarnings("ignore", _SIZE_OF_AN_IMAGE)
    warnings.filterwarnings("ignore", _VIEW_OF_A_UNIT)
    logging.getLogger(_KERNELS_OF_BITSANDBYTES).setLevel(logging.ERROR)
