"""One process of a learner of several, on CPU devices of its own: python -m tests.learner.process INDEX COUNT PORT FOLDER

Trains, saves, restores and publishes the tiny learner; process 0 writes what came of it to FOLDER/<COUNT>.npz. COUNT 1 is the
same work in one process, with as many devices.
"""

import os
import pathlib
import sys

DEVICES = 2

if __name__ == "__main__":
    index, count, port = map(int, sys.argv[1:4])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES // count}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

from deepgrpo.learner import distributed, sharding  # noqa: E402
from deepgrpo.weights import hf, publish  # noqa: E402
from deepgrpo.weights.checkpoint import Checkpoints  # noqa: E402
from tests.learner import tiny  # noqa: E402

KEYS = dict(objective__kl_coef=0.1, optim__ppo_epochs=2)


def main(folder: pathlib.Path, coordinator: str, index: int, count: int) -> None:
    distributed.initialise({"coordinator": coordinator if count > 1 else "", "process": (index, count)})
    with distributed.open_channel(coordinator) as channel:
        distributed.require_agreement(DEVICES, "devices")
        checkpoints = Checkpoints(folder / f"checkpoints-{count}", keep=2)
        config = tiny.model_config()
        target = sharding.parameter_shardings(tiny.parameters(), sharding.make_mesh((1, DEVICES, 1)))
        params = hf.load(folder / "model", shardings=target)
        learner = tiny.make_learner((1, DEVICES, 1), params=params, channel=channel, **KEYS)
        others = {
            "save": lambda step: checkpoints.save(step, learner.state, {}),
            "restore": lambda step: learner.restore(checkpoints.restore(step, learner.abstract_state())[0]),
            "store": lambda folder: publish.store(learner.policy, folder, config, jnp.dtype("float32")),
            "fetch": lambda: fetched(learner.state),
        }
        if index:
            learner.follow(others)
            return

        def both(name, **fields):
            learner.announce(name, **fields)
            return others[name](**fields)

        metrics = [learner.update(tiny.make_rows(9, seed=s), s) for s in range(2)]
        both("save", step=2)
        learner.update(tiny.make_rows(3, seed=2), 2)  # what the restored learner must not remember
        both("restore", step=2)
        metrics.append(learner.update(tiny.make_rows(17, seed=3), 3))
        scores = learner.score([(row.prompt_ids, row.response_ids) for row in tiny.make_rows(5, seed=4)])
        snapshots = publish.Snapshots(
            folder / f"snapshots-{count}", "orbax", config, config.vocab_size, "float32", folder / "model"
        )
        published = hf.load(snapshots.write(snapshots.take(learner.policy, learner.announce), "3", {}))
        state = both("fetch")
        assert tiny.same(published, state["params"])
        leaves = {f"leaf/{i}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        norms = {"grad_norm": np.array([m["actor/grad_norm"] for m in metrics]), "scores": np.concatenate(scores)}
        np.savez(folder / f"{count}.npz", **leaves, **norms)


def fetched(tree):
    """A tree on the host, put together from all processes' shards."""
    return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[4]), f"127.0.0.1:{port}", index, count)
