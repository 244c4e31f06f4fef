"""train.main with a scripted engine in place of vLLM's servers: python train_process.py DEVICES ARGUMENTS...

The engine answers every second sample rightly and every other with a wrong sum. Weights take their way up to the Hugging Face
folder, whose embedding it keeps.
"""

import os
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"

import numpy as np  # noqa: E402

from deepgrpo import train  # noqa: E402
from deepgrpo.data import carry_chain  # noqa: E402
from deepgrpo.data import tokenizer as tokenizer_lib  # noqa: E402
from deepgrpo.preflight import rules
from deepgrpo.types import Completion, as_ids  # noqa: E402
from deepgrpo.weights.publish import Snapshots  # noqa: E402


class Engine:
    def __init__(self, config, learner, version):
        self.tokenizer = tokenizer_lib.load_tokenizer(config.model.path)
        model = learner.model.config
        folder = f"{config.weights.folder}/{os.getpid()}"
        self.snapshots = Snapshots(folder, "orbax", model, model.num_real_ids, config.model.dtype, config.model.path)
        self.learner, self.version, self.probe = learner, version, None
        self.publish(learner.policy, version)

    def publish(self, policy, version):
        taken = self.snapshots.take(policy, self.learner.announce)
        scores = self.learner.start_score([(as_ids([1]), as_ids([2, 3]))], at_temperature_1=True)
        self.snapshots.write(taken, str(version), {})
        self.version, self.probe = version, float(scores()[0].sum())

    def generate(self, requests, sampling, on_done=None, feed=None):
        groups = []
        for i, request in enumerate(requests):
            (question,) = re.findall(r"\d\d(?:[a-z]\d)+=\?", self.tokenizer.decode(request.prompt_ids))
            right = carry_chain.solution(question)
            answers = (right, right[:-2] + "0" + right[-1:])
            groups.append([self.complete(answers[j % 2], sampling) for j in range(len(request.seeds))])
            for j, completion in enumerate(groups[-1]):
                if on_done:
                    on_done(i, j, completion)
        return groups

    def complete(self, answer, sampling):
        ids = as_ids([*self.tokenizer.encode(answer, add_special_tokens=False), sampling.stop_ids[0]])
        return Completion(ids, np.full(len(ids), -1.0, np.float32), "stop", self.version)

    def metrics(self):
        return {"rollout_mismatch/probe": self.probe}


def open_engine(config, stack, learner, prompts, sampling, version, run):
    engine = Engine(config, learner, version)
    return engine, engine.publish


if __name__ == "__main__":
    train.open_engine = open_engine
    train.main(*rules.from_command_line(["train.py", *sys.argv[2:]]))
