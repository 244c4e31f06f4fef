"""A mini-batch of padded rows for the tests of losses: its slots, and its loss as the sum of its micro-batches' shares."""

import jax
import jax.numpy as jnp
import numpy as np

from deepgrpo.learner import objective as losses


def slots_of(source, **arrays):
    """What `loss_share` reads, for rows [B, R] with one row a line; arrays that are not given are 0 (rollout_logp: unknown)."""
    scored = np.asarray(source) >= 0
    lengths = np.maximum(scored.sum(1, keepdims=True), 1)
    zeros = np.zeros(scored.shape)
    slots = {name: zeros for name in ("advantages", "teacher_coef", "ref_logp")} | {"rollout_logp": zeros * np.nan}
    slots |= {"source": source, "row_share": scored / lengths, "sample": scored.astype(np.int32)}
    return {name: jnp.asarray(value) for name, value in (slots | arrays).items()}


def shares(o, slots, old_logp, rows_each, auto_coef=1.0, entropy=None):
    """(tokens, totals, function): function(logp [B, R]) is (loss, (sums, parts for the automatic coefficient [A, 2]))."""
    tokens = losses.count_tokens(slots["source"]).astype(jnp.float64)
    totals = losses.denominators(slots["source"], slots["row_share"], o)
    weights = losses.stream_weights(totals, o, auto_coef)

    def total(logp):
        loss, sums, parts = 0.0, None, []
        for start in range(0, len(logp), rows_each):
            part = slice(start, start + rows_each)
            micro = {name: x[part] for name, x in slots.items()}
            h = 0 * logp[part] if entropy is None else entropy(logp)[part]
            share, s = losses.loss_share(logp[part], h, old_logp[part], micro, weights, o)
            loss, sums = loss + share, s if sums is None else jax.tree.map(jnp.add, sums, s)
            parts.append(jnp.stack(losses.coef_parts(s["loss"], totals, o)))
        return loss, (sums, jnp.stack(parts))

    return tokens, totals, total
