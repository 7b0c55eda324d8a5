"""Samples of a step, with numbers of their own."""

import numpy as np
import torch

from shardwise.recipes.sampling.samples import to_samples
from shardwise.types import Sample


def rewritten(sample, **fields) -> Sample:
    return Sample(**{name: getattr(sample, name) for name in Sample.__slots__} | fields)


def with_noise(samples, *names, seed=1):
    """Every sample with numbers of its own in the named arrays, 0 where not trained."""
    rng = np.random.default_rng(seed)
    for sample in samples:
        fields = {name: -rng.uniform(0.1, 2.0, len(sample.token_ids)) for name in names}
        yield rewritten(sample, **{n: torch.tensor(np.where(sample.loss_mask, v, 0.0)).float() for n, v in
                                   fields.items()})  # fmt: skip


def two_groups(make_group, rewards=((1.0, 0.0, 0.5), (0.0, 1.0, 1.0))):
    return to_samples([make_group(r, lengths=[3, 1, 2], prompt_ids=(7,) * (2 + i)) for i, r in enumerate(rewards)])


def as_lists(samples, *names):
    return [[getattr(sample, name).tolist() for name in names] for sample in samples]
