"""Model FLOPs against a count by hand."""

import numpy as np
import pytest

from deepgrpo.learner import costs
from deepgrpo.model.config import ModelConfig
from tests.learner import tiny


def qwen() -> ModelConfig:
    shape = dict(vocab_size=151936, num_layers=28, width=1536, num_heads=12, num_kv_heads=2, head_size=128, mlp_width=8960)
    return tiny.model_config(**shape, tie_embeddings=True)


def test_a_forward_pass_counts_every_product():
    c = tiny.model_config()
    lengths, scored = [3, 7], 6
    expected = 0
    for n in lengths:
        for _ in range(c.num_layers):
            expected += 2 * n * c.width * c.num_heads * c.head_size * 2  # queries, output
            expected += 2 * n * c.width * c.num_kv_heads * c.head_size * 2  # keys, values
            expected += 2 * n * c.width * c.mlp_width * 3
            expected += sum(2 * 2 * c.head_size * (t + 1) for t in range(n)) * c.num_heads
    expected += 2 * scored * c.width * c.vocab_size
    assert costs.forward_flops(c, sum(lengths), costs.causal_pairs(lengths), scored) == expected


def test_qwen_1p5b():
    """2.62 GFLOP a token in the layers and 0.467 in the head, besides attention: twice the parameters that are multiplied."""
    assert costs.forward_flops(qwen(), 1, 0, 0) == pytest.approx(2.62e9, rel=2e-3)
    assert costs.forward_flops(qwen(), 0, 0, 1) == pytest.approx(0.467e9, rel=1e-3)


def test_a_prompt_that_is_computed_once_is_counted_once():
    config = tiny.model_config()
    rows = [row for row in tiny.sibling_rows() if row.group_id == "siblings4"]
    lengths = [len(row.prompt_ids) + len(row.response_ids) - 1 for row in rows]
    P, n = len(rows[0].prompt_ids) - 1, len(rows)
    apart = costs.update_flops(config, [rows], [sum(lengths)])
    together = costs.update_flops(config, [rows], [sum(lengths) - (n - 1) * P])
    assert apart == 3 * costs.forward_flops(
        config, sum(lengths), costs.causal_pairs(lengths), sum(len(r.response_ids) for r in rows)
    )
    assert apart - together == pytest.approx(3 * (n - 1) * costs.forward_flops(config, P, costs.causal_pairs([P]), 0))


@pytest.mark.parametrize(
    "kind, dtype, peak",
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v6 lite", "bfloat16", 918e12),
        ("NVIDIA H20", "bfloat16", 0.0),
        ("NVIDIA H200", "float32", 0.0),
        ("cpu", "bfloat16", 0.0),
    ],
)
def test_peaks(kind, dtype, peak):
    import jax.numpy as jnp

    assert costs.peak_flops(kind, jnp.dtype(dtype)) == peak


def test_metrics_of_an_update():
    learner = tiny.make_learner(objective__kl_coef=0.0)
    learner.peak_flops = 1e9
    rows = tiny.make_rows(3)
    metrics = learner.update(rows, 0)
    lengths = [len(row.prompt_ids) + len(row.response_ids) - 1 for row in rows]
    expected = 3 * costs.forward_flops(
        tiny.model_config(), sum(lengths), costs.causal_pairs(lengths), sum(len(r.response_ids) for r in rows)
    )
    assert metrics["perf/flops"] == expected
    seconds = metrics["timing_s/update_actor"]
    np.testing.assert_allclose(metrics["perf/mfu/actor"], expected / seconds / 1e9)
    np.testing.assert_allclose(metrics["perf/tokens_per_second"], sum(lengths) / seconds)
    assert "perf/mfu/actor" not in tiny.make_learner(objective__kl_coef=0.0).update(rows, 0)
