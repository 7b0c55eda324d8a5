"""What torch documents of kernels that only GPUs have, in loops."""

import itertools

import torch


def varlen_over_caches(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size, enable_gqa, seqused_k
):
    """A query for each row, which has seqused_k of the keys between cu_seq_k and is at their end. [T, H, d];
    window_size = (left, right), -1 no end. Beside the output [T, H, d] the logarithms of the sums [H, T]."""
    assert return_aux.lse
    assert cu_seq_q.tolist() == list(range(len(query) + 1))
    assert (max_q, max_k) == (1, int(seqused_k.max()))
    assert {tensor.dtype for tensor in (cu_seq_q, cu_seq_k, seqused_k)} == {torch.int32}
    assert key.is_contiguous()
    assert enable_gqa == (query.shape[1] != key.shape[1])
    group = query.shape[1] // key.shape[1]
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for row, (start, used) in enumerate(zip(cu_seq_k[:-1].tolist(), seqused_k.tolist(), strict=True)):
        assert used <= int(cu_seq_k[row + 1]) - start
        left, right = window_size
        assert right in (0, -1)
        first = start if left < 0 else max(start, start + used - 1 - left)
        for head in range(query.shape[1]):
            seen = slice(first, start + used)
            scores = key[seen, head // group] @ query[row, head] * scale
            out[row, head] = scores.softmax(0) @ value[seen, head // group]
            lse[head, row] = scores.logsumexp(0)
    return out, lse


def varlen_over_packs(
    query,
    key,
    value,
    cu_seqlens,
    _cu_seqlens_k,
    _max_q,
    _max_k,
    *,
    scale,
    window_size,
    enable_gqa=False,
    return_aux=None,
):
    """Causal attention inside every sequence of a pack, token by token. [T, H, d]; window_size = (left, right), -1 no
    end. With return_aux also the logarithms of the sums [H, T]."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert query.shape[2] == value.shape[2]
    group = query.shape[1] // key.shape[1]
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for token, seen in _seen(cu_seqlens, window_size):
        for head in range(query.shape[1]):
            scores = (key[seen, head // group] @ query[token, head]) * scale
            out[token, head] = scores.softmax(0) @ value[seen, head // group]
            lse[head, token] = scores.logsumexp(0)
    return out if return_aux is None else (out, lse)


def flash_backward_over_packs(
    gradient,
    query,
    key,
    value,
    out,
    lse,
    cu_seqlens,
    _cu_seqlens_k,
    _max_q,
    _max_k,
    dropout_p,
    is_causal,
    _rng_state,
    _unused,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    """The gradients of query, key and value as FlashAttention-2 computes them (algorithm 2) from the output and the
    logarithms that it is given."""
    assert dropout_p == 0
    assert is_causal == (window_size_left == -1)
    assert gradient.is_contiguous()
    group = query.shape[1] // key.shape[1]
    of_query, of_key, of_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    for token, seen in _seen(cu_seqlens, (window_size_left, window_size_right)):
        for head in range(query.shape[1]):
            keys, values = key[seen, head // group], value[seen, head // group]
            weights = (keys @ query[token, head] * scale - lse[head, token]).exp()
            of_weights = values @ gradient[token, head]
            of_scores = weights * (of_weights - gradient[token, head] @ out[token, head]) * scale
            of_query[token, head] += of_scores @ keys
            of_key[seen, head // group] += torch.outer(of_scores, query[token, head])
            of_value[seen, head // group] += torch.outer(weights, gradient[token, head])
    return of_query, of_key, of_value


def _seen(cu_seqlens, window_size):
    """(token, the keys that it sees) of a pack."""
    assert window_size[1] == 0
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        for token in range(start, end):
            yield token, slice(start if window_size[0] < 0 else max(start, token - window_size[0]), token + 1)
