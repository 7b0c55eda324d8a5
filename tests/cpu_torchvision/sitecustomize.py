"""Lets torchvision be imported beside torch's CPU build. PyPI has it built for CUDA, whose operators are missing then.
What Qwen's processors take from it is Python. On PYTHONPATH, every process of Python imports this file."""

import sys
from importlib.abc import MetaPathFinder


class DeclaresOperators(MetaPathFinder):
    """Finds nothing: declares them when torchvision is looked for first."""

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float iou) -> Tensor")


sys.meta_path.insert(0, DeclaresOperators())
