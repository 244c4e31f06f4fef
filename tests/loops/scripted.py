"""Stand-ins around a loop: an engine with a script, a grader that reads the last token, a tokenizer of numbers."""

import collections
import concurrent.futures

import numpy as np

from deepgrpo.types import Completion, Grade, as_ids

EOS, RIGHT = 99, 7


class ScriptedEngine:
    """Returns the script's completions of an exact prompt in the order in which they are asked for, wrapping around."""

    version = 0

    def __init__(self, script):
        self.script = {tuple(entry["prompt_ids"]): entry["completions"] for entry in script}
        self.asked = collections.Counter()

    def generate(self, requests, sampling, on_done=None):
        results = []
        for i, request in enumerate(requests):
            prompt = tuple(request.prompt_ids.tolist())
            results.append([])
            for j in range(len(request.seeds)):
                entry = self.script[prompt][self.asked[prompt] % len(self.script[prompt])]
                self.asked[prompt] += 1
                ids = as_ids(entry["token_ids"][: sampling.max_model_len - len(prompt)])
                full = len(ids) + len(prompt) >= sampling.max_model_len
                reason = "length" if full else entry["finish_reason"]
                results[-1].append(Completion(ids, np.zeros(len(ids), np.float32), reason, 0))
                on_done(i, j, results[-1][-1])
        return results


class LastTokenGrader:
    def submit(self, answer):
        words = answer.response.split()
        right = answer.finish_reason != "length" and bool(words) and words[-1] == str(RIGHT)
        future = concurrent.futures.Future()
        future.set_result(Grade(float(right), right, "right" if right else "wrong"))
        return future


class NumberTokenizer:
    def decode(self, ids):
        return " ".join(map(str, ids))
