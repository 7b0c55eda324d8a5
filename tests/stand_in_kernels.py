"""What torch documents of kernels that only GPUs have, in loops."""

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
