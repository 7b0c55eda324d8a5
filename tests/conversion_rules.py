"""Preloaded by ranks.py, where Python starts in the root of the repository: transformers compiles the conversion rules
of all families when it is first asked for one."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
