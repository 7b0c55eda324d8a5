"""What an engine reads from disk and writes there: model folders, and the training state of checkpoints."""
