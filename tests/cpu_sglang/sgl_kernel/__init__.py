"""Operators of SGLang's CPU path in plain torch: PyPI has sgl_kernel built for CUDA alone."""

import torch

_MASK = 0xFFFFFFFF


def _absent(*_, **__):
    raise NotImplementedError("an operator of speculative decoding, which this stand-in lacks")


# Names that SGLang imports on a CPU.
copy_all_layer_kv_cache_cpu = rotate_input_ids_cpu = fill_accept_out_cache_loc_cpu = fill_bonus_tokens_cpu = _absent
build_tree_kernel_efficient_cpu = verify_tree_greedy_cpu = assign_draft_cache_locs_contiguous_cpu = _absent
assign_extend_cache_locs_cpu = build_draft_decode_metadata_cpu = _absent


def assign_req_to_token_pool_cpu(rows, pool, starts, ends, places, pool_width):
    """Writes the places of each request's new tokens into its row of the pool."""
    offset = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[row, start:end] = places[offset : offset + end - start].to(pool.dtype)
        offset += end - start


def _mix(state, block):
    block = (block * 0xCC9E2D51) & _MASK
    block = ((block << 15) | (block >> 17)) & _MASK
    block = (block * 0x1B873593) & _MASK
    state = state ^ block
    state = ((state << 13) | (state >> 19)) & _MASK
    return (state * 5 + 0xE6546B64) & _MASK


@torch.library.custom_op(
    "sgl_kernel::murmur_hash32_cpu", mutates_args=(), schema="(Tensor seed, Tensor positions, Tensor columns) -> Tensor"
)
def murmur_hash32_cpu(seed, positions, columns):
    """MurmurHash3 of (seed, position, column), as SGLang's Triton kernel has it: [N], [N], [M] -> uint32 [N, M]."""
    seed = seed.view(torch.int64)
    state = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        state = _mix(state, block)
    state = _mix(state[:, None], columns.to(torch.int64)[None] & _MASK)
    state = state ^ 16
    state = state ^ (state >> 16)
    state = (state * 0x85EBCA6B) & _MASK
    state = state ^ (state >> 13)
    state = (state * 0xC2B2AE35) & _MASK
    state = state ^ (state >> 16)
    return state.to(torch.uint32)


@murmur_hash32_cpu.register_fake
def _(seed, positions, columns):
    return seed.new_empty((len(seed), len(columns)), dtype=torch.uint32)
