"""Attention, its backends and its cached form against float64 NumPy written from the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from deepgrpo.learner import sharding
from deepgrpo.model import attention as module
from deepgrpo.model.attention import (
    Context,
    Sight,
    attention,
    cached_attention,
    choose_backend,
    packed_attention,
    prepare,
    write_cache,
)

B, T, N, K, H, S = 2, 5, 6, 2, 4, 7


def arrays(length, queries=T):
    rng = np.random.default_rng(0)
    shapes = (B, queries, N, H), (B, length, K, H), (B, length, K, H)
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


def test_segments_see_their_own_past_and_their_prefix():
    sight = Sight(jnp.array([[1, 1, 2, 2, 0]]), None)
    own = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(np.asarray(sight.mask())[0].astype(int), own)
    context = Context(jnp.zeros((1, 3), jnp.int32), jnp.array([[1, 2, 0]]), jnp.array([[0, 0, 2, 2, 0]]))
    prefix = np.array([[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 0]])
    mask = np.asarray(sight._replace(context=context).mask())[0].astype(int)
    np.testing.assert_array_equal(mask, np.concatenate([prefix, own], axis=1))
    np.testing.assert_array_equal(np.asarray(sight._replace(context=context).mask(2, 4))[0], mask[2:4, :7])


def packed(queries: int = 8):
    """Two packed rows in one cell; row 0 holds a prefix of 3 and a response that sees it, row 1 another response, and padding."""
    q, k, v = arrays(queries, queries)
    segments = jnp.array([[1] * 3 + [2] * (queries - 3), [1] * (queries - 2) + [0] * 2])
    prefixes = jnp.array([[0] * 3 + [2] * (queries - 3), [1] * (queries - 2) + [0] * 2])
    context = Context(jnp.array([[0, 1, 2, 0] * 2]), jnp.array([[2, 2, 2, 0], [1, 1, 1, 0]]), prefixes)
    return [jnp.asarray(x) for x in (q, k, v)], Sight(segments, context)


def expected(qkv, sight):
    q, k, v = (np.asarray(x) for x in qkv)
    k, v = (np.concatenate([np.stack([x[0, [0, 1, 2, 0]]] * B), x], axis=1) for x in (k, v))
    return reference(q, k, v, np.asarray(sight.mask()))


def run(backend, qkv, sight, placed=None):
    return packed_attention(*qkv, sight, prepare(sight, backend, qkv[0].dtype), backend, placed)


@pytest.mark.parametrize("backend,chunk", [("xla", 256), ("xla", 3), ("splash", 256)])
def test_backends_agree_in_value_and_gradient(backend, chunk, monkeypatch):
    qkv, sight = packed()
    weight = np.random.default_rng(2).normal(size=qkv[0].shape) * (np.asarray(sight.segments) > 0)[..., None, None]

    def loss(backend):
        def of(qkv):
            out = run(backend, qkv, sight)
            return jnp.sum(out * weight), out

        return jax.jit(jax.value_and_grad(of, has_aux=True))(qkv)

    (_, plain), gradients = loss("xla")
    monkeypatch.setattr(module, "QUERY_CHUNK", chunk)
    (_, out), other = loss(backend)
    real = np.asarray(sight.segments) > 0
    for result in (plain, out):
        np.testing.assert_allclose(np.asarray(result)[real], expected(qkv, sight)[real], rtol=0, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), other, gradients)


def test_what_a_key_weighs_in_two_rows_adds_up_in_float32():
    """A context token that 512 rows see: bfloat16 would lose most of 512 equal gradients."""
    x = jnp.ones((512, 2, 1, 1), jnp.bfloat16)
    gradient = jax.grad(lambda x: jnp.sum(module.gather(x, jnp.zeros((1, 512), jnp.int32)).astype(jnp.float32)))(x)
    assert gradient[0, 0, 0, 0] == 512 and float(jnp.sum(gradient)) == 512


def test_cudnn_is_lowered_for_cuda_with_the_additive_mask(monkeypatch):
    """Without a GPU only the program can be looked at: one fused call forward and one backward, for grouped heads."""

    class Version:
        cudnn_get_version = staticmethod(lambda: 91000)

    monkeypatch.setattr(cudnn, "cuda_versions", Version)
    (q, k, v), sight = packed()
    q, k, v = (jnp.tile(x, (1, 8, 1, 16)).astype(jnp.bfloat16) for x in (q, k, v))
    sight = Sight(jnp.ones((B, 64), jnp.int32), None)
    step = jax.jit(jax.grad(lambda *qkv: jnp.sum(run("cudnn", qkv, sight).astype(jnp.float32)), argnums=(0, 1, 2)))
    text = step.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaScaleBiasSoftmaxBackward") == 1 and text.count("@__cudnn$fmhaScaleBiasSoftmax(") == 1
    bias = np.asarray(module.cudnn_bias(sight.mask(), jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(bias[:, 0] == 0.0, np.asarray(sight.mask()))
    assert set(np.unique(bias)) == {0.0, float(cudnn.get_large_negative_number(np.dtype(jnp.bfloat16)))}  # JAX's own value


def by_xla(*qkv, implementation, **keys):
    """What `jax.nn.dot_product_attention` asks of cuDNN, computed by XLA; lengths and head size must be those of a kernel."""
    assert implementation == "cudnn" and not any(x.shape[1] % module.TILE or x.shape[3] % 8 for x in qkv)
    return DOT_PRODUCT_ATTENTION(*qkv, implementation="xla", **keys)


DOT_PRODUCT_ATTENTION = jax.nn.dot_product_attention


@pytest.mark.parametrize("backend", ["cudnn", "splash"])
@pytest.mark.parametrize("queries", [7, 150, 400])
def test_odd_lengths_and_head_sizes_are_filled_up(backend, queries, monkeypatch):
    """Head size 4, a context of 4 tokens, rows of one block and of several: values, and gradients of what is not padding."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    qkv, sight = packed(queries)
    weight = np.random.default_rng(2).normal(size=qkv[0].shape) * (np.asarray(sight.segments) > 0)[..., None, None]

    def loss(backend):
        return jax.jit(jax.value_and_grad(lambda qkv: jnp.sum(run(backend, qkv, sight) * weight)))(qkv)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * queries), loss("xla"), loss(backend))


def test_blocks_divide_what_they_cut():
    assert [module.splash_block(n) for n in (128, 256, 384, 640, 1024, 1152, 6144)] == [128, 256, 384, 128, 512, 384, 512]


@pytest.mark.parametrize(("kv_heads", "devices"), [(2, 3), (1, 2), (2, 2), (2, 6)])
def test_kv_heads_that_the_mesh_does_not_divide_are_repeated(kv_heads, devices):
    """6 query heads over 2, 3 or 6 devices: splash gives what xla does, in value and gradient."""
    (q, k, v), sight = packed()
    mesh = sharding.make_mesh((1, 1, devices), jax.devices()[:devices])
    placed = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor", None))

    def loss(backend, placed):
        of = lambda qkv: jnp.sum(run(backend, qkv, sight, placed)[:, :6] ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(of))([q, k[:, :, :kv_heads], v[:, :, :kv_heads]])

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-5), loss("splash", placed), loss("xla", None))


def test_auto_is_the_fastest_that_the_device_has():
    class Device:
        def __init__(self, platform, version="", capability="0"):
            self.platform, self.compute_capability = platform, capability
            self.client = type("Client", (), {"platform_version": version})

    hopper, volta, amd = Device("gpu", "PJRT C API cuda 12090", "9.0"), Device("gpu", "cuda", "7.0"), Device("gpu", "rocm")
    for device, dtype, backend in (
        (hopper, jnp.bfloat16, "cudnn"),
        (hopper, jnp.float32, "xla"),
        (volta, jnp.bfloat16, "xla"),
        (amd, jnp.bfloat16, "xla"),
        (Device("tpu"), jnp.bfloat16, "splash"),
        (jax.devices()[0], jnp.bfloat16, "xla"),
    ):
        assert choose_backend("auto", device, dtype) == backend
    assert choose_backend("xla", hopper, jnp.bfloat16) == "xla"


def test_splash_runs_on_a_mesh():
    qkv, sight = packed()
    mesh = sharding.make_mesh((1, 1, 2), jax.devices()[:2])
    placed = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor", None))
    real = np.asarray(sight.segments) > 0
    out = np.asarray(jax.jit(lambda *qkv: run("splash", qkv, sight, placed))(*qkv))
    np.testing.assert_allclose(out[real], expected(qkv, sight)[real], rtol=0, atol=1e-5)


def test_writes_land_at_their_positions_and_padding_is_dropped():
    _, k, v = arrays(2)
    cache = jnp.zeros((B, K, H, S)), jnp.zeros((B, K, S, H))
    keys, values = write_cache(cache, k, v, jnp.array([[3, 4], [6, S]]))
    expected = np.zeros((B, S, K, H))
    expected[0, 3:5], expected[1, 6] = k[0], k[1, 0]
    np.testing.assert_array_equal(np.asarray(keys).transpose(0, 3, 1, 2), expected)
    expected[0, 3:5], expected[1, 6] = v[0], v[1, 0]
    np.testing.assert_array_equal(np.asarray(values).transpose(0, 2, 1, 3), expected)
