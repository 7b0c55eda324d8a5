"""The commands: each recipe composes engine, rollout, rewards and algorithms. The only folder that sees everything.

Each command has a file here, beside what several of them share. Subfolders: checkpointing/ (saving and resuming),
sampling/ (from prompts to judged completions) and rank/ (what lives in each rank's process).
"""
