"""Stands in for SGLang where it is not installed: put its parent folder on PYTHONPATH."""
