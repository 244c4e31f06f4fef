"""Publishing to a fake server: what is proven, what each lie and failure comes to, and what stays on disk."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepgrpo.rollout.vllm_fleet import Deadlines, PublishError
from deepgrpo.types import as_ids
from deepgrpo.weights import engines, hf, publish
from deepgrpo.weights.engines import SelfTestError, own_folder, probe_text, self_test
from deepgrpo.weights.publish import Snapshots
from tests.rollout import tiny
from tests.rollout.fake_vllm import Knobs
from tests.rollout.numpy_decoder import Model
from tests.rollout.vllm_rig import Rig, nudged, tokenizer_folder, weights


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(**settings):
        made.append(Rig(tmp_path, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def generate(one, seed=1):
    return one.engine.generate(tiny.make_requests([9], samples=2, max_tokens=3), tiny.plain())[0][0]


@pytest.mark.parametrize("route", ["orbax", "direct"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_snapshot_is_the_policy_without_phantom_rows(tmp_path, route, tied):
    config = dataclasses.replace(tiny.CONFIG, tie_embeddings=tied)
    params = tiny.random_params(3, config)
    snapshots = Snapshots(tmp_path / "w", route, config, tiny.REAL, jnp.float32, tokenizer_folder(tmp_path / "t"))
    folder = snapshots.write(snapshots.take(params), "5", {})
    written = json.loads((folder / "config.json").read_text())
    assert (written["vocab_size"], written["eos_token_id"]) == (tiny.REAL, [3, 4])
    ids = np.arange(20)
    logits = np.asarray(tiny.full_forward(params, ids[None], np.ones((1, 20), np.int32), config))[0, :, : tiny.REAL]
    np.testing.assert_allclose(Model(folder).logits(ids), logits, rtol=0, atol=1e-4)
    loaded = hf.load(folder)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    np.testing.assert_array_equal(loaded["layers"]["mlp"]["up_proj"]["kernel"], params["layers"]["mlp"]["up_proj"]["kernel"])
    snapshots.close()


def test_publish_and_its_order_of_calls(rig):
    one = rig(servers=2)
    for version, params in ((1, nudged(weights(0), 1e-6)), (2, weights(5)), (3, weights(5))):
        one.publish(params, version)
        completion = generate(one)
        assert completion.version == one.engine.version == version
        request = tiny.make_requests([9], samples=2, max_tokens=3)[0]
        np.testing.assert_allclose(completion.logps, tiny.learner_logps(params, request, completion, tiny.plain()), atol=1e-4)
    paths = [path for _, path, _ in one.fakes[0].calls if path != "/deepgrpo/generate"][:7]
    assert paths == [
        *("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"),
        *("/weight_info", "/v1/completions"),
    ]
    times = {key for key in one.engine.metrics() if key.startswith("timing_s/")}
    assert times == {f"timing_s/publish_{part}" for part in ("blocked", "snapshot", "orbax", "convert", "load", "proof", "total")}
    assert one.kept() == ["3"]  # all servers have acknowledged it


def test_the_learner_may_update_at_once(rig):
    """The copy is complete though the arrays it was made from are deleted, as donation does."""
    one, params = rig(), jax.tree.map(jnp.copy, weights(5))
    one.publish(params, 1)
    jax.tree.map(lambda x: x.delete(), params)
    assert generate(one).version == 1


LIES = {  # knob: what the message says; both for a tiny update, that no tolerance can tell, and for another policy
    "ignore_load": {
        "tiny": "log-probs of a fixed text are to the last bit those of version 0",
        "other": "these are other weights",
    },
    "ignore_version": {"tiny": "serves weights of version 0, expected version 1", "other": "serves weights of version 0"},
    "stale_cache": {"tiny": "a greedy answer is to the last bit those of version 0", "other": "holds keys and values of older"},
    "reset_fails": {"tiny": "/reset_prefix_cache did not succeed", "other": "/reset_prefix_cache did not succeed"},
}


@pytest.mark.parametrize("update", ["tiny", "other"])
@pytest.mark.parametrize("knob", LIES)
def test_a_lie_stops_the_run_or_costs_a_restart(rig, knob, update):
    params = nudged(weights(0), 1e-6) if update == "tiny" else weights(5)
    one = rig(attached=True)  # cannot be restarted
    if knob == "ignore_version":  # what an attached server says it serves was set by the first load
        assert one.fakes[0].version == "0"
    setattr(one.fakes[0].knobs, knob, True)
    one.publish(params, 1)
    with pytest.raises(PublishError, match=r"step 1 were not proven .*proven before: version 0(.|\n)*" + LIES[knob][update]):
        generate(one)
    assert (one.snapshots.folder / "0").is_dir()  # what the engine has acknowledged is still there
    with pytest.raises(PublishError):  # and nobody gets past it
        one.publish(params, 2)


def test_our_own_server_is_restarted_on_the_new_weights(rig):
    one = rig(servers=2)
    one.fakes[1].knobs.ignore_load = True
    one.publish(weights(5), 1)
    assert generate(one).version == 1
    assert [fake.restarts for fake in one.fakes] == [0, 1] and one.fakes[1].folder.name == "0"


@pytest.mark.parametrize("knob", ["fail_load", "hang_load"])
def test_a_load_that_fails_once_is_repeated_after_a_pause(rig, knob, monkeypatch):
    pauses = []
    monkeypatch.setattr(publish.time, "sleep", lambda seconds, sleep=publish.time.sleep: (pauses.append(seconds), sleep(seconds)))
    one = rig(deadlines=Deadlines(control=5.0, load=0.5, start=5.0))
    setattr(one.fakes[0].knobs, knob, 1)
    one.publish(weights(5), 1)
    assert generate(one).version == 1 and one.fakes[0].restarts == 0
    assert one.kept() == ["1.1"] and publish.PAUSE in pauses


def test_a_dead_server_is_restarted_on_the_new_weights(rig):
    one = rig()
    one.fakes[0].die()
    one.publish(weights(5), 1)
    assert generate(one).version == 1 and one.fakes[0].restarts == 1


@pytest.mark.parametrize("damage", ["missing", "truncated"])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_damaged_snapshot(rig, monkeypatch, damage, lasting):
    one, write = rig(attached=True), Snapshots.write

    def damaged(self, policy, name, seconds):
        folder = write(self, policy, name, seconds)
        if name == "1" or lasting:
            file = folder / "model.safetensors"
            shutil.rmtree(folder) if damage == "missing" else file.write_bytes(file.read_bytes()[:-100])
        return folder

    monkeypatch.setattr(Snapshots, "write", damaged)
    one.publish(weights(5), 1)
    if lasting:
        with pytest.raises(PublishError, match=r"step 1 .*(.|\n)*did not load .*/1.1: "):
            generate(one)
    else:
        assert generate(one).version == 1


def test_other_tensors_are_listed_and_not_tried_again(rig):
    one = rig()
    w = one.fakes[0].model.w
    w["model.extra.weight"], w["model.norm.weight"] = np.zeros(1), np.zeros(5)
    del w["lm_head.weight"]
    one.publish(weights(5), 1)
    message = r"missing: model.extra.weight\n.*unexpected: lm_head.weight\n.*mismatched: model.norm.weight"
    with pytest.raises(PublishError, match=message):
        generate(one)
    assert len(one.fakes[0].bodies("/collective_rpc")) == 1 and one.fakes[0].restarts == 0


def test_other_weights_at_the_start_are_refused(rig):
    with pytest.raises(PublishError, match="weights of step 0 do not reach the engine(.|\n)*these are other weights"):
        rig(attached=True, knobs=[Knobs(ignore_load=True)])


def test_self_test(rig, monkeypatch):
    monkeypatch.setattr(engines, "SELF_TEST_ROLLOUTS", 6)
    one, prompts = rig(), [as_ids(np.arange(n)) for n in (3, 8, 5)]
    settings = dict(prompts=prompts, sampling=tiny.plain(), seed=0)
    assert self_test(one.engine, one.student, tolerance=1e-4, **settings) < 1e-5
    one.student.policy = nudged(weights(0), 0.01)
    with pytest.raises(SelfTestError, match=r"differ from the learner's by 0.\d+ on average .*compare vllm.extra_args"):
        self_test(one.engine, one.student, tolerance=1e-4, **settings)


def test_folders_of_dead_processes_are_removed(tmp_path):
    mine = own_folder(tmp_path)
    host = mine.name.rpartition("-")[0]
    for name in (f"{host}-999999999", f"{host}-1", "other-5"):
        (tmp_path / name).mkdir()
    assert own_folder(tmp_path) == mine
    assert {path.name for path in tmp_path.iterdir()} == {f"{host}-1", "other-5"}


def test_the_probe_is_longer_than_a_block():
    probe = probe_text([as_ids([1, 2]), as_ids([3])], block=8, max_model_len=32)
    assert probe.tolist() == [1, 2, 3] * 3 + [1, 2]
    with pytest.raises(ValueError, match="rollout.max_model_len is 14: raise it"):
        probe_text([as_ids([1])], block=8, max_model_len=14)
