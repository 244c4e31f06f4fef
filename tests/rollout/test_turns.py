"""Several turns in one call: requests that become ready meanwhile, and turns that a text ends."""

import queue
import random
import tempfile
import threading

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from deepgrpo.data import carry_chain
from deepgrpo.rollout.engine import BadAnswer, Request, checked
from deepgrpo.rollout.stops import StopTexts
from deepgrpo.types import as_ids
from tests.rollout import tiny
from tests.rollout.test_engine import WHOLE
from tests.rollout.vllm_rig import Rig, weights

TEXT = "<search>who wrote it</search>\nx</search>> é世 <code>a > b</code>\n </search>\n\n" * 4


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|end|>"]))
    return Rust(made)


class Rust:
    """The part of a Hugging Face tokenizer that is asked here."""

    def __init__(self, tokenizer):
        self.encode, self.decode, self.get_vocab_size = tokenizer.encode, tokenizer.decode, tokenizer.get_vocab_size
        self.batch_decode = tokenizer.decode_batch


def metaspace() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=340, special_tokens=["<|end|>", *pieces]))
    return Rust(made)


def demo() -> tokenizers.Tokenizer:
    """The vocabulary that ships: of the two demos' students."""
    with tempfile.TemporaryDirectory() as folder:
        carry_chain.build_tokenizer(folder)
        return Rust(tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json"))


SEARCHES = [("</search>",), ("</search>", "</code>"), ("\n",), ("世",)]
CASES = [(make, texts) for make in (byte_level, metaspace) for texts in SEARCHES] + [(demo, ("?",)), (demo, ("\n####", "=?"))]


@pytest.mark.parametrize("make, texts", CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_turn_ends_with_the_first_token_at_which_the_text_is_there(make, texts):
    """Against decoding every beginning, on true text and on random ids, which may hold parts of characters."""
    tokenizer, rng, text = make(), random.Random(0), "a57?63\nb63:11\n####1=?" * 12 if make is demo else TEXT
    stops, cases = StopTexts(tokenizer, texts), [tokenizer.encode(text[i:]).ids for i in range(0, 80, 3)]
    frequent = [i for case in cases for i in case]
    cases += [[rng.choice(frequent) for _ in range(30)] for _ in range(100)]
    for token in range(tokenizer.get_vocab_size()):
        assert (token in stops.ids(tokenizer.get_vocab_size())) == any(text in tokenizer.decode([token]) for text in texts)
    ended = 0
    for ids in cases:
        ends = [n for n in range(1, len(ids) + 1) if any(text in tokenizer.decode(ids[:n]) for text in texts)]
        assert stops.length(ids) == (ends[0] if ends else 0)
        for known in range(0, (ends[0] if ends else len(ids)), 7):
            assert stops.length(ids, known) == (ends[0] if ends else 0)
        ended += bool(ends)
    assert ended > 10


@pytest.mark.parametrize("texts", [("",), ("</a>", "a>")])
def test_stop_texts_that_cannot_end_a_turn_are_refused(texts):
    with pytest.raises(ValueError, match="empty or part of another"):
        StopTexts(byte_level(), texts)


def test_what_comes_after_a_stop_text_is_left_out_at_the_door():
    class Letters:
        def decode(self, ids):
            return "".join(chr(ord("a") + i) for i in ids)

    sampling = tiny.plain(stop_ids=(3,), stops=StopTexts(Letters(), ("fh",)))
    whole = {name: WHOLE[name] for name in ("version", "room")} | {"bound": 90, "sampling": sampling}
    found = checked([1, 5, 7, 9, 3], [-1.0] * 5, "stop", **whole)
    assert found.ids.tolist() == [1, 5, 7] and len(found.logps) == 3 and found.finish_reason == "stop"
    assert checked([1, 5, 7, 9, 9, 9, 9, 9], [-1.0] * 8, "length", **whole).finish_reason == "stop"
    with pytest.raises(BadAnswer):
        checked([1, 5, 9], [-1.0] * 3, "stop", **whole)  # the engine says that it stopped, and no rule says why


class Talk:
    """Each answer is followed by three further tokens, until it has had its turns; they are ready after a random while."""

    def __init__(self, requests, turns, delay=0.0):
        self.requests, self.turns, self.delay = list(requests), turns, delay
        self.owner = [(i, 0) for i in range(len(requests))]
        self.open = sum(len(request.seeds) for request in requests)
        self.ready, self.lock, self.found, self.threads = queue.SimpleQueue(), threading.Lock(), {}, []

    def on_done(self, i, j, completion):
        talk, turn = self.owner[i]
        self.found[talk, turn, self.requests[i].seeds[j]] = completion.ids.tolist(), np.round(completion.logps, 4).tolist()

        def answer():
            with self.lock:
                if turn + 1 == self.turns:
                    self.open -= 1
                    self.ready.put(None)
                    return
                prompt = as_ids([*self.requests[i].prompt_ids, *completion.ids, 7, 8, 9])
                self.ready.put((Request(prompt, (self.requests[i].seeds[j] + 1000,), 6), (talk, turn + 1)))

        self.threads.append(threading.Timer(self.delay * random.random(), answer))
        self.threads[-1].start()

    def take(self, wait):
        taken = []
        while (wait and not taken and self.open) or not self.ready.empty():
            if (entry := self.ready.get()) is not None:
                self.requests.append(entry[0])
                self.owner.append(entry[1])
                taken.append(entry[0])
        return taken

    def close(self):
        self.open = 0
        self.ready.put(None)


def make_requests():
    return tiny.make_requests([5, 3, 9], samples=3, max_tokens=5)


SAMPLING = dict(max_model_len=56, stop_ids=(3, 4, 11, 12))


@pytest.mark.parametrize("kind", ["native", "vllm"])
def test_requests_that_become_ready_are_sampled_as_if_they_came_alone(kind, tmp_path):
    rig = Rig(tmp_path) if kind == "vllm" else None
    engine = rig.engine if rig else tiny.make_engine(weights(0), slots=4)
    try:
        sampling, talks = tiny.plain(**SAMPLING), []
        for delay in (0.0, 0.05):
            talk = Talk(make_requests(), 3, delay)
            engine.generate(make_requests(), sampling, talk.on_done, talk)
            assert talk.open == 0 and len(talk.requests) == 3 + 2 * 9
            talks.append(talk)
        assert talks[0].found == talks[1].found, "the order of arrival decides nothing"
        request, place = next((r, p) for r, p in zip(talk.requests, talk.owner, strict=True) if p[1] == 2)
        (alone,) = engine.generate([request], sampling)[0]
        assert talk.found[(*place, request.seeds[0])][0] == alone.ids.tolist()
    finally:
        if rig:
            rig.close()


def test_a_feed_without_anything_ends_the_call():
    talk = Talk(make_requests(), 1)
    found = tiny.make_engine(slots=4).generate(make_requests(), tiny.plain(**SAMPLING), talk.on_done, talk)
    assert [len(group) for group in found] == [3, 3, 3]


def test_vllm_is_asked_to_stop_at_the_texts(tmp_path):
    class Letters:
        def decode(self, ids):
            return "".join(chr(200 + i) for i in ids)

    rig = Rig(tmp_path)
    try:
        stop = chr(200 + 17)
        found = rig.engine.generate(make_requests(), tiny.plain(stop_ids=(3,), stops=StopTexts(Letters(), (stop,))))
        parameters = rig.fakes[0].bodies("/deepgrpo/generate")[0]["sampling_params"]
        assert parameters["stop"] == [stop] and parameters["include_stop_str_in_output"] and parameters["detokenize"]
        assert all(17 not in completion.ids[:-1] for group in found for completion in group)
    finally:
        rig.close()
