"""What FlashAttention computes, in plain PyTorch, with the signatures and demands of the libraries.

Whatever is handed over and is not what they take raises AssertionError.
"""

import torch

HALF = (torch.float16, torch.bfloat16)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, aligned at the bottom right: the last query sees all keys. q [T, H, d]; k, v [S, G, d]."""
    num_queries, num_keys = q.shape[0], k.shape[0]
    assert num_queries <= num_keys
    group = q.shape[1] // k.shape[1]
    key, value = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), key) * q.shape[-1] ** -0.5
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, value).to(q.dtype)


def attend_packed(q, k, v, query_bounds, key_bounds, max_q, max_k) -> torch.Tensor:
    """Packed sequences, whose keys and values are packed too."""
    assert q.dtype in HALF and k.dtype == v.dtype == q.dtype
    assert {x.stride(-1) for x in (q, k, v)} == {1}
    out = q.new_full(q.shape, torch.nan)
    for bounds in (query_bounds, key_bounds):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds[0] == 0
    assert query_bounds[-1] == q.shape[0] and key_bounds[-1] == k.shape[0] == v.shape[0]
    assert int(query_bounds.diff().max()) == max_q and int(key_bounds.diff().max()) == max_k
    spans = zip(query_bounds.tolist(), key_bounds.tolist(), strict=True)
    first_query, first_key = next(spans)
    for last_query, last_key in spans:
        keys = slice(first_key, last_key)
        rows = slice(first_query, last_query)
        out[rows] = attend(q[rows], k[keys], v[keys])
        first_query, first_key = last_query, last_key
    return out


def _pages(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows of a sequence. A page may be any, also where it is not read."""
    assert ((table >= 0) & (table < cache.shape[0])).all()
    return cache[table.long()].flatten(0, 1)[:length]


def _check_paged(q, keys, values, table) -> None:
    assert q.dtype in HALF and keys.dtype == values.dtype == q.dtype
    assert keys.shape == values.shape and keys.shape[1] % 256 == 0
    assert table.dtype == torch.int32 and table.stride(-1) == 1 and q.stride(-1) == 1


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Of flash-attn 2.8."""
    assert causal and not dropout_p and softmax_scale is None and window_size == (-1, -1)
    assert not softcap and alibi_slopes is None and not deterministic and not return_attn_probs
    _check_paged(q, k, v, block_table)
    contexts = cu_seqlens_k.diff().tolist()
    assert block_table.shape[0] == len(contexts)
    packed = (
        torch.cat([_pages(cache, *one) for one in zip(block_table, contexts, strict=True)])
        for cache in (k, v)
    )
    return attend_packed(q, *packed, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Of flash-attn 2.8."""
    others = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, softmax_scale)
    assert causal and all(other is None for other in (*others, alibi_slopes))
    assert window_size == (-1, -1) and not softcap and not return_softmax_lse
    _check_paged(q, k_cache, v_cache, block_table)
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.shape == (q.shape[0],) == block_table.shape[:1]
    rows = zip(q, block_table, cache_seqlens.tolist(), strict=True)
    return torch.stack(
        [
            attend(row, _pages(k_cache, table, context), _pages(v_cache, table, context))
            for row, table, context in rows
        ]
    )
