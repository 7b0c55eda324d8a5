"""Mixtures of experts: parallelism, guards, loads and replayed choices of routers."""
