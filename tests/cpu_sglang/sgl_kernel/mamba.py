"""Names that SGLang imports on a CPU, for models that this stand-in cannot run."""

from sgl_kernel import _absent

causal_conv1d_fn_cpu = causal_conv1d_update_cpu = chunk_gated_delta_rule_cpu = _absent
