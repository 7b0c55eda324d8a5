from runs import assets, command, metrics_of, shell, start

__all__ = ["assets", "command", "metrics_of", "shell", "start"]
