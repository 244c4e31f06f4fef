"""The learner's compiled programs: what is lowered for a batch shape, compiled once, timed and counted."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from deepgrpo.learner import policy as policies
from deepgrpo.learner import sharding, step
from deepgrpo.learner.objective import Objective
from deepgrpo.learner.optim import Optim
from deepgrpo.learner.packing import FLOAT_ARRAYS, INT_ARRAYS, Shape
from deepgrpo.model.transformer import Transformer


@dataclasses.dataclass
class Programs:
    """Programs by (name, shape): `train_step`, `score`, `score_at_1` (temperature 1) and `score_reference` (reference's dtype).

    abstract_state: the learner's state as ShapeDtypeStructs with shardings. block: see learner.logprob_block.
    seconds: spent compiling so far.
    """

    model: Transformer
    mesh: Mesh
    abstract_state: dict[str, Any]
    objective: Objective
    optim: Optim
    temperature: float
    num_real_ids: int
    block: int
    seconds: float = 0.0
    _compiled: dict[tuple, Callable] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self._compiled)

    def __call__(self, name: str, shape: Shape) -> Callable:
        """The compiled program; compiled on first use, which is timed and counted."""
        if (name, shape) not in self._compiled:
            start = time.monotonic()
            self._compiled[name, shape] = self.lower(name, shape).compile()
            self.seconds += time.monotonic() - start
        return self._compiled[name, shape]

    def lower(self, name: str, shape: Shape) -> Any:
        """A program lowered for a batch shape, from shapes alone: nothing is allocated."""
        mesh, whole, batch = self.mesh, sharding.replicated(self.mesh), sharding.micro_batches(self.mesh)
        block = max(1, self.block * sharding.batch_shards(mesh) // shape.B)
        temperature = 1.0 if name == "score_at_1" else self.temperature
        policy = policies.Policy(self.model, mesh, temperature, self.num_real_ids, block)

        def scalar(dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((), dtype, sharding=whole)

        dtypes = dict.fromkeys(INT_ARRAYS, jnp.int32) | dict.fromkeys(FLOAT_ARRAYS + ("old_logp", "ref_logp"), jnp.float32)
        size = (shape.A, shape.B, shape.T)
        arrays = {key: jax.ShapeDtypeStruct(size, dtype, sharding=batch) for key, dtype in dtypes.items()}
        state = dict(self.abstract_state)
        reference = state.pop("reference", None)
        if name == "train_step":
            shardings = (jax.tree.map(lambda x: x.sharding, state), whole, batch)

            def train_step(*args):
                return step.train_step(policy, self.objective, self.optim, *args)

            function = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
            return function.lower(state, arrays, scalar(jnp.bool_), scalar(jnp.float32), scalar(jnp.int32))

        def score(*args):
            return policies.score(policy, *args)

        params = reference if name == "score_reference" else state["params"]
        return jax.jit(score, out_shardings=batch).lower(params, arrays, scalar(jnp.int32))
