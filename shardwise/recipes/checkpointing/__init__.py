"""The checkpoints of a run: saved whole or not at all, verified, kept, and found again."""
