"""An agent on a real vLLM: stop texts, admission while it samples, and log-probs of rows of several turns."""

from tests.loops.test_agent_train import AGENT
from tests.system.test_vllm_train import VLLM, lines, pytestmark, run  # noqa: F401

KEYS = {key.replace("__", "."): value for key, value in AGENT.items()} | {"curriculum.pool": "none", "teacher.enabled": False}


def test_turns_end_at_stop_texts_and_the_learner_agrees(student, tmp_path):
    flags = [f"--config.{key}={value}" for key, value in KEYS.items()]
    flags.append("--config.objective.zero_gradient_rows=keep")
    records, folder, _ = run(tmp_path, ["-m", "deepgrpo.train"], *VLLM, *flags, steps=2)
    for record in records[1:]:
        assert record["agent/calls"] > 5 and record["num_turns/main_chain/mean"] > 5
        assert record["rollout_mismatch/abs_max"] <= 1e-4
    for rollout in lines(folder / "rollouts" / "2.jsonl"):
        turns = [turn["text"] for turn in rollout["turns"] if turn["who"] == "student"]
        assert all(text.count("+") == 1 and text.endswith("+") for text in turns[:-1]), "nothing is sampled past a stop text"
