"""Meshes and where parameters live on them."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from deepgrpo.learner import sharding
from tests.learner import tiny


def test_one_size_takes_the_devices_that_are_left():
    assert dict(sharding.make_mesh((1, -1, 2)).shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert sharding.batch_shards(sharding.make_mesh((2, 2, 2))) == 4
    assert dict(sharding.make_mesh((1, -1, 1), jax.devices()[:1]).shape)["fsdp"] == 1


@pytest.mark.parametrize("shape", [(3, -1, 1), (1, 4, 1), (16, 1, 1)])
def test_a_mesh_that_does_not_fit_says_so(shape):
    with pytest.raises(ValueError, match="does not fit 8 devices"):
        sharding.make_mesh(shape)


@pytest.mark.parametrize("shape", [(1, 8), (-1, -1, 1), (0, 1, 8)])
def test_a_mesh_that_means_nothing_says_so(shape):
    with pytest.raises(ValueError, match="learner.mesh is"):
        sharding.make_mesh(shape)


def test_rules():
    mesh = sharding.make_mesh((1, 4, 2))
    params = tiny.parameters(tiny.model_config(vocab_size=41))
    specs = jax.tree.map(lambda s: s.spec, sharding.parameter_shardings(params, mesh))
    assert specs["embed_tokens"]["embedding"] == P(None, "fsdp")  # 41 rows cannot be halved: kept whole
    assert specs["layers"]["self_attn"]["q_proj"]["kernel"] == P(None, "fsdp", "tensor")
    assert specs["layers"]["mlp"]["down_proj"]["kernel"] == P(None, "tensor", "fsdp")
    assert specs["layers"]["self_attn"]["k_proj"]["bias"] == P(None, "tensor")
    assert specs["norm"]["scale"] == P()
    with pytest.raises(ValueError, match="no sharding rule matches parameter 'adapter/kernel'"):
        sharding.parameter_shardings({"adapter": {"kernel": np.zeros(2)}}, mesh)


def test_placing_never_shares_a_buffer():
    mesh = sharding.make_mesh((1, 8, 1))
    source = {"norm": {"scale": jax.numpy.ones(8)}}
    placed = sharding.place(source, sharding.parameter_shardings(source, mesh))
    jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)(placed)
    assert source["norm"]["scale"].sum() == 8
