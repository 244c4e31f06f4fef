"""Attention and its cached form against float64 NumPy written from the formula."""

import jax.numpy as jnp
import numpy as np

from deepgrpo.model.attention import attention, cached_attention, segment_mask, write_cache

B, T, N, K, H, S = 2, 5, 6, 2, 4, 7


def arrays(length):
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, length, K, H), (B, length, K, H)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def reference(q, k, v, mask):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(*q.shape[:3]):
        kv = n // (N // K)
        scores = np.where(mask[b, t], k[b, :, kv] @ q[b, t, n] / np.sqrt(H), -np.inf)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v[b, :, kv]
    return out


def test_both_forms_follow_the_formula():
    q, k, v = arrays(S)
    mask = np.random.default_rng(1).random((B, T, S)) < 0.6
    mask[..., 0] = True
    expected = reference(q, k, v, mask)
    np.testing.assert_allclose(attention(q, k, v, mask), expected, rtol=0, atol=1e-5)
    cached = cached_attention(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask)
    np.testing.assert_allclose(cached, expected, rtol=0, atol=1e-5)


def test_segments_see_their_own_past_only():
    segments = np.array([[1, 1, 2, 2, 0, 0]])
    expected = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    np.testing.assert_array_equal(np.asarray(segment_mask(jnp.asarray(segments)))[0].astype(int), expected)


def test_writes_land_at_their_positions_and_padding_is_dropped():
    _, k, v = arrays(2)
    cache = jnp.zeros((B, K, H, S)), jnp.zeros((B, K, S, H))
    keys, values = write_cache(cache, k, v, jnp.array([[3, 4], [6, S]]))
    expected = np.zeros((B, S, K, H))
    expected[0, 3:5], expected[1, 6] = k[0], k[1, 0]
    np.testing.assert_array_equal(np.asarray(keys).transpose(0, 3, 1, 2), expected)
    expected[0, 3:5], expected[1, 6] = v[0], v[1, 0]
    np.testing.assert_array_equal(np.asarray(values).transpose(0, 2, 1, 3), expected)
