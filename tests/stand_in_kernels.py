"""What torch documents of kernels that only GPUs have, in loops."""

import itertools

import torch


def varlen_over_caches(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k
):
    """A query for each row, which has seqused_k of the keys between cu_seq_k and is at their end. [T, H, d];
    window_size = (left, right), -1 no end."""
    assert cu_seq_q.tolist() == list(range(len(query) + 1))
    assert (max_q, max_k) == (1, int(seqused_k.max()))
    assert {tensor.dtype for tensor in (cu_seq_q, cu_seq_k, seqused_k)} == {torch.int32}
    assert key.is_contiguous()
    assert enable_gqa == (query.shape[1] != key.shape[1])
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for row, (start, used) in enumerate(zip(cu_seq_k[:-1].tolist(), seqused_k.tolist(), strict=True)):
        assert used <= int(cu_seq_k[row + 1]) - start
        left, right = window_size
        assert right in (0, -1)
        first = start if left < 0 else max(start, start + used - 1 - left)
        for head in range(query.shape[1]):
            seen = slice(first, start + used)
            scores = key[seen, head // group] @ query[row, head] * scale
            out[row, head] = scores.softmax(0) @ value[seen, head // group]
    return out


def varlen_over_packs(
    query, key, value, cu_seqlens, _cu_seqlens_k, _max_q, _max_k, *, scale, window_size, enable_gqa=False
):
    """Causal attention inside every sequence of a pack, token by token. [T, H, d]; window_size = (left, right), -1 no
    end."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        for token in range(start, end):
            first = start if window_size[0] < 0 else max(start, token - window_size[0])
            assert window_size[1] == 0
            for head in range(query.shape[1]):
                keys, values = key[first : token + 1, head // group], value[first : token + 1, head // group]
                out[token, head] = ((keys @ query[token, head]) * scale).softmax(0) @ values
    return out
