"""The sampling half of an RL step: draws prompts, and has completions generated and judged in time for training."""
