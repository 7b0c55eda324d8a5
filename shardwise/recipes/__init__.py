"""The commands: each recipe composes engine, rollout, rewards and algorithms. The only folder that sees everything.

A file for each command lies here, beside what several of them share. What has a room of its own: checkpointing/ (saving
and resuming), sampling/ (from prompts to judged completions) and rank/ (what lives in each rank's process).
"""
