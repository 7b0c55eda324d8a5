"""The sampling half of an RL step: prompts drawn, completions generated and judged, on time for training."""
