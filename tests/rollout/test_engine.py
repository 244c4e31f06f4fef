"""What holds for every engine: the door that samples pass, and vocabularies with holes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.learner.logprob import target_logps
from deepgrpo.model.transformer import Transformer
from deepgrpo.rollout.engine import BadAnswer, Request, checked
from deepgrpo.types import as_ids
from tests.rollout import tiny
from tests.rollout.vllm_rig import Rig, weights

WHOLE = {"ids": [5, 7, 3], "logps": [-0.5, -1.0, 0.0], "reason": "stop", "version": 0, "room": 8}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, ""),
        ({"ids": [5, 90, 3]}, "token id 90 has no token"),  # phantom
        ({"ids": [5, 60, 3]}, "token id 60 has no token"),  # a hole
        ({"ids": [5, -1, 3]}, "token id -1 has no token"),
        ({"ids": [5, 2**40, 3]}, "has no token"),
        ({"ids": [5, 7.0, 3]}, "expected numbers"),
        ({"ids": ["5", "7", "3"]}, "expected numbers"),
        ({"ids": [[5, 7, 3]]}, "shape"),
        ({"ids": []}, "shape"),
        ({"logps": [-0.5, -1.0]}, "shape"),
        ({"logps": [-0.5, None, 0.0]}, "expected numbers"),
        ({"logps": [-0.5, float("nan"), 0.0]}, "log-prob nan"),
        ({"logps": [-0.5, float("-inf"), 0.0]}, "log-prob -inf"),
        ({"logps": [-0.5, 0.7, 0.0]}, "log-prob 0.7"),
        ({"reason": "length"}, "room was for 8"),
        ({"ids": [5, 3, 3]}, "stop ids at"),  # went on after its end
        ({"ids": [5, 7, 8]}, "stop ids at"),
        ({"room": 2}, "room was for 2"),
        ({"reason": "abort"}, "abort"),
        ({"reason": None}, "None"),
    ],
)
def test_the_door_of_every_engine(change, kind):
    arguments = WHOLE | change
    if not kind:
        assert checked(**arguments, sampling=tiny.plain(stop_ids=(3,)), bound=90, holes=(60,)).ids.tolist() == arguments["ids"]
        return
    with pytest.raises(BadAnswer, match=kind):
        checked(**arguments, sampling=tiny.plain(stop_ids=(3,)), bound=90, holes=(60,))


def test_holes_of_a_vocabulary_are_never_sampled_and_engines_and_learner_agree(tmp_path):
    one, requests = Rig(tmp_path), tiny.make_requests([5, 12], samples=3, max_tokens=6)
    requests = [Request(as_ids(r.prompt_ids % 40), r.seeds, r.max_tokens) for r in requests]
    one.engine.holes = holes = tuple(range(50, 90))
    completions = one.engine.generate(requests, tiny.plain())
    one.close()
    assert max(c.ids.max() for c in sum(completions, [])) < 50
    params, masked = weights(0), dataclasses.replace(tiny.CONFIG, holes=holes)
    native = tiny.make_engine(params, config=masked).generate(requests, tiny.plain())
    assert max(c.ids.max() for c in sum(native, [])) < 50
    for request, group in zip(requests, completions, strict=True):  # the learner's path: this model's log-probs
        for c in group:
            tokens = jnp.asarray(np.concatenate([request.prompt_ids, c.ids]))[None]
            model = Transformer(masked, jnp.float32)
            hidden, _ = model.apply({"params": params}, tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens))
            logits = model.apply({"params": params}, hidden, method="logits")
            logps, _ = target_logps(logits[0, len(request.prompt_ids) - 1 : -1], jnp.asarray(c.ids), 1.0, tiny.REAL, True)
            np.testing.assert_allclose(c.logps, logps, rtol=0, atol=1e-4)
