"""From a model folder to a sharded model. The order of `build_sharded` is the documentation."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.config import EngineConfig, ModelError
from shardwise.engine.attention import PACKED_ATTENTION, PackedCall, register_packed_attention
from shardwise.engine.logprobs import scored_logprobs
from shardwise.engine.weights import load_weights
from shardwise.ops import UNREGISTERED_ATTENTION, LogitTransform, PackedLayout, decoder_layers, unsupported_reason


class PolicyModel(nn.Module):
    """A causal language model that returns logprobs instead of logits.

    It is the root FSDP unit: whatever the root owns (embedding, final norm, output projection) is gathered while this
    forward runs, so the projection can be applied in chunks without a call to the model's own head.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        text_config = causal_lm.config.get_text_config()
        self._num_layers: int = text_config.num_hidden_layers
        self._transform = LogitTransform.from_config(text_config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packed: PackedLayout,
        scored: Tensor,
        *,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """input_ids, position_ids [T]; scored [N] positions to score -> logprobs [T], entropy [T], both float32.

        Raises:
            ModelError: not every layer computed its attention through the packed one.
        """
        call = PackedCall(packed)
        hidden = self.causal_lm.base_model(
            input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, packed=call
        ).last_hidden_state[0]
        if call.num_attention_calls != self._num_layers:
            raise ModelError(
                f"{type(self.causal_lm).__name__} is not supported: its {self._num_layers} layers called the packed "
                f"attention {call.num_attention_calls} times instead of once each"
            )
        return scored_logprobs(
            hidden,
            self.causal_lm.get_output_embeddings().weight,
            input_ids,
            scored,
            temperature=temperature,
            transform=self._transform,
            with_entropy=with_entropy,
        )


def build_sharded(
    folder: Path, config: EngineConfig, mesh: DeviceMesh, *, device: torch.device, trainable: bool
) -> tuple[PolicyModel, int]:
    """Builds, shards and loads a model. Parameters are float32 masters if trainable, else in the compute dtype.

    Returns:
        The model and the bytes of weights that this rank read.
    Raises:
        ModelError: not a causal language model, or the weights do not fit the config.
    """
    compute_dtype = getattr(torch, config.param_dtype)
    model = PolicyModel(build_on_meta(folder, torch.float32 if trainable else compute_dtype))
    shard(model, config, mesh)
    model.to_empty(device=device)
    initialize_buffers(model.causal_lm)
    num_bytes = load_weights(model.causal_lm, folder)
    if not trainable:
        model.requires_grad_(False)
    return model, num_bytes


def build_on_meta(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory behind its parameters.

    Raises:
        ModelError: not a causal language model, of a family that packed attention cannot compute, or with dropout.
    """
    register_packed_attention()
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED_ATTENTION)
    except (ValueError, OSError, KeyError) as error:
        if error.args == (PACKED_ATTENTION,):  # some families look the name up in a table of their own
            raise ModelError(f"{folder}: {config.model_type} is not supported: it {UNREGISTERED_ATTENTION}") from None
        raise ModelError(f"{folder} cannot be built as a causal language model: {error}") from None
    if reason := unsupported_reason(model):
        raise ModelError(f"{folder}: {reason}")
    _refuse_dropout(model)
    model.train()
    return model


def _refuse_dropout(model: PreTrainedModel) -> None:
    """With dropout two passes over the same tokens would give two sets of logprobs, and their ratio would be noise."""
    active = [f"{name}={part.p}" for name, part in model.named_modules() if isinstance(part, nn.Dropout) and part.p]
    attention_dropout = getattr(model.config, "attention_dropout", 0.0)
    if attention_dropout:
        active.insert(0, f"attention_dropout={attention_dropout}")
    if active:
        raise ModelError(
            f"{type(model).__name__} has dropout, which is not supported ({', '.join(active[:3])} is active); "
            "set it to 0 in config.json"
        )


def shard(model: PolicyModel, config: EngineConfig, mesh: DeviceMesh) -> None:
    """One FSDP unit per decoder layer, then the root with what is left.

    Gradients are plain sums over ranks: the loss is already divided by the global denominators.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype), reduce_dtype=getattr(torch, config.reduce_dtype)
    )
    for layer in decoder_layers(model.causal_lm):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def initialize_buffers(model: PreTrainedModel) -> None:
    """Computes the buffers that no checkpoint holds (rotary frequencies, embedding scales)."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers skips marked tensors
    model.initialize_weights()
