"""Which rows are at work: a place that becomes free is taken at once, whatever the size of the groups."""

import math

import pytest
import torch

from shardwise.rollout import EmbeddedEngine
from shardwise.types import GenerateRequest

STOPS = list(range(3, 13))
"""About one token in thirteen ends a completion, so lengths are ragged."""


def counted(engine):
    """[B, L] of every forward pass."""
    shapes, forward = [], engine.hidden_states

    def note(input_ids, *arguments):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids, *arguments)

    engine.hidden_states = note
    return shapes


@pytest.mark.parametrize(
    ("group_size", "num_groups", "max_rows"),
    [(1, 40, 8), (8, 6, 12), (8, 6, 16), (16, 4, 16), (16, 3, 24), (24, 2, 8)],
    ids=[
        "single",
        "rows of half a group",
        "two groups",
        "as many as a group",
        "one and a half",
        "larger than all rows",
    ],
)
def test_a_finished_rows_place_is_taken_at_once_and_a_prompt_read_once(model_folders, group_size, num_groups, max_rows):
    """As many steps as the tokens need, and at most one completion longer: while anything waits no row is idle."""
    engine = EmbeddedEngine.from_folder(
        model_folders["qwen3"],
        dtype=torch.float32,
        max_rows=max_rows,
        device=torch.device("cpu"),
        stop_token_ids=STOPS,
    )
    wanted = [
        GenerateRequest(
            uid=f"{n}",
            prompt_ids=list(range(20, 24 + n % 3)),
            num_completions=group_size,
            max_tokens=30,
            temperature=1.0,
        )
        for n in range(num_groups)
    ]
    shapes = counted(engine)
    lengths = [len(completion.token_ids) for group in engine.generate(wanted) for completion in group]
    assert len(set(lengths)) > 5
    decoded = [rows for rows, width in shapes if width == 1]
    sampled_by_steps = sum(lengths) - len(lengths)  # the first token comes with the prompt
    assert sum(decoded) == sampled_by_steps
    assert len(decoded) <= math.ceil(sampled_by_steps / max_rows) + max(lengths)
    idle = next((step for step, rows in enumerate(decoded) if rows < max_rows), len(decoded))
    assert len(decoded) - idle <= max(lengths), "rows were idle while completions waited"
    assert sum(rows for rows, width in shapes if width > 1) == num_groups
