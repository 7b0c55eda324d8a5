from runs import assets, command, job, marked, metrics_of, shell, start

__all__ = ["assets", "command", "job", "marked", "metrics_of", "shell", "start"]
