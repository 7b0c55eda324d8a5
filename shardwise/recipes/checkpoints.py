"""Finds the weights that a run left."""

import re
from pathlib import Path


def latest_hf_folder(path: str) -> str:
    """The `hf/` folder of the newest checkpoint if `path` is a run's output folder; else `path` itself."""
    steps = {
        int(match[1]): folder
        for folder in Path(path).glob("checkpoints/step_*/hf")
        if (match := re.fullmatch(r"step_(\d+)", folder.parent.name))
    }
    return str(steps[max(steps)]) if steps else path
