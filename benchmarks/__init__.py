"""Throughput and memory against peers, run as `python -m benchmarks.NAME`. The last printed line is one JSON object."""
