from runs import assets, command, marked, metrics_of, shell

__all__ = ["assets", "command", "marked", "metrics_of", "shell"]
