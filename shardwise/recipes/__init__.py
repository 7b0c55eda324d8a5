"""The commands: each recipe composes engine, rollout, rewards and algorithms. The only folder that sees everything."""
