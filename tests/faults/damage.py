"""Ways to damage a model folder: each function returns one that changes the folder that it is given."""

import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

from deepgrpo.preflight.rules import from_command_line

EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def copied(student, folder) -> pathlib.Path:
    shutil.copytree(student, folder)
    return folder


def settings(path, *more):
    """The demo's configuration with a model folder."""
    return from_command_line(["train", "--config=configs/carry_chain.py", f"--config.model.path={path}", *more])[0]


def write(name, content):
    """Puts text or bytes in the place of a file."""
    return lambda f: (f / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def keys(name, **changes):
    """Changes keys of a JSON file; None takes one out."""

    def change(f):
        content = json.loads((f / name).read_text()) | changes
        (f / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def config(**changes):
    return keys("config.json", **changes)


def template(text):
    return keys("tokenizer_config.json", chat_template=text)


def tensors(change):
    """Changes the weights' mapping of name to array."""

    def apply(f):
        w = load_file(f / WEIGHTS)
        save_file(change(w) or w, f / WEIGHTS)

    return apply


def cut(name, end):
    return lambda f: (f / name).write_bytes((f / name).read_bytes()[:end])


def rename(name, to):
    return lambda f: (f / to).parent.mkdir(exist_ok=True) or (f / name).rename(f / to)


def remove(*names):
    return lambda f: [(f / name).unlink() for name in names]


def sharded(f, drop=False):
    """The weights in two files and an index."""
    w = load_file(f / WEIGHTS)
    halves = dict(enumerate([{n: x for i, (n, x) in enumerate(sorted(w.items())) if i % 2 == half} for half in (0, 1)], 1))
    for i, half in halves.items():
        save_file(half, f / f"model-{i}.safetensors")
    index = {"weight_map": {name: f"model-{i}.safetensors" for i, half in halves.items() for name in half}}
    (f / INDEX).write_text(json.dumps(index))
    (f / WEIGHTS).unlink()
    if drop:
        (f / "model-2.safetensors").unlink()


def several(*changes):
    return lambda f: [change(f) for change in changes]


def tokens(change):
    """Changes the content of tokenizer.json."""

    def apply(f):
        content = json.loads((f / "tokenizer.json").read_text())
        change(content)
        (f / "tokenizer.json").write_text(json.dumps(content))

    return apply


def add_token(number, in_vocabulary=True):
    more = {"id": number, "content": "<more>", "special": True}
    more |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return tokens(lambda c: c["added_tokens"].append(more) or in_vocabulary and c["model"]["vocab"].update({"<more>": number}))


def halve(w):
    w["model.embed_tokens.weight"] = w["lm_head.weight"] = w["model.embed_tokens.weight"][:40].copy()


def prepend(name, content):
    return lambda f: (f / name).write_bytes(content + (f / name).read_bytes())


def link(name, target):
    return lambda f: (f / name).unlink() or (f / name).symlink_to(target)


def rows(count):
    """Gives the embedding so many rows, of ones."""
    return several(
        config(vocab_size=count), tensors(lambda w: w.update(dict.fromkeys(EMBEDDINGS, np.ones((count, 128), "float32"))))
    )


def sparse(f):
    """The same model under other numbers: the end token moves from 2 to 47 (rows and all), and 2 and 43 to 46 are holes."""

    def move(w):
        for name in EMBEDDINGS:
            w[name][[2, 47]] = w[name][[47, 2]]

    def renumber(c):
        for token in c["added_tokens"]:
            token["id"] = {2: 47}.get(token["id"], token["id"])
        c["model"]["vocab"]["<|im_end|>"] = 47

    several(
        tensors(move), tokens(renumber), *(keys(name, eos_token_id=47) for name in ("config.json", "generation_config.json"))
    )(f)
