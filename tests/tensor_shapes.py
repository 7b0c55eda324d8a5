"""What shapes of tensors a piece of code makes: for claims about what never exists as a whole."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorShapes(TorchDispatchMode):
    """Records the shape of every tensor that an operation returns, views too."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        return out

    @property
    def largest(self):
        """Elements of the largest tensor."""
        return max(torch.Size(shape).numel() for shape in self.shapes)
