"""SGLang's deterministic mode on a CPU, in which alone it draws from a seed of each request. SGLang finds this as a
plugin, by the entry point beside it, in each of its processes."""


def register() -> None:
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Without a prefix cache: with one, this backend gives other last bits to what is found in it.
    add_deterministic_attention_backend_choices(["torch_native"])
    # Its products that do not depend on the batch are kernels for GPUs, which it would register for torch.
    HookRegistry.register("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", _keep_torch, HookType.REPLACE)


def _keep_torch(enable_bmm: bool = True) -> None:
    """In float32, in which no rounding moves a draw, torch's own products serve."""
