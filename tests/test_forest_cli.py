"""The command line of saved forests, and a run that begins with another run's forest."""

import json
import re
import shutil

import pytest

from deepgrpo import forest
from deepgrpo.config import ConfigError
from deepgrpo.config.folders import Vocabulary, find, vocabulary_of_forest, vocabulary_of_model, write_vocabulary
from deepgrpo.curriculum import forest_state, forest_tools
from deepgrpo.data import dataset
from tests.test_train import in_process

SMALL = {
    **{"data__batch_size": 8, "data__train": "carry_chain:train:8", "optim__mini_batch_prompts": 8, "validation__every": 0},
    **{"checkpoint__every": 2, "checkpoint__keep": 2, "telemetry__rollouts_every": 0, "train__steps": 3},
}


@pytest.fixture(scope="module")
def run(student, tmp_path_factory):
    """A run of three steps."""
    folder = tmp_path_factory.mktemp("forest_cli")
    in_process(folder, **SMALL)
    return folder / "carry_chain"


def read(path) -> forest_state.SavedForest:
    return forest_state.read(str(find(path).folder))


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def states(saved: forest_state.SavedForest) -> int:
    return sum(node.parent is not None for node in saved.nodes())


def test_a_run_begins_with_another_runs_forest_and_resumes_without_it(student, run, tmp_path):
    saved, source = read(run), tmp_path / "source"
    forest.main(["merge", str(run), "--out", str(source)])
    assert content(source) == content(find(run).folder)
    settings = SMALL | {"curriculum__start_from": source}
    records = in_process(tmp_path, **settings | {"train__steps": 1})
    ready = sum(any(node.active for node in tree.nodes[1:]) for tree in saved.trees.values())
    assert ready and records[0]["synthetic_inject/injected_count"] == min(ready, 6)  # of 8 prompts, in the first step
    begun = read(tmp_path / "carry_chain")
    assert {node.ids.tobytes() for node in saved.nodes()} <= {node.ids.tobytes() for node in begun.nodes()}
    assert begun.trees.keys() == saved.trees.keys() and forest_tools.last_step(begun) == 1
    shutil.rmtree(source)
    assert [record["step"] for record in in_process(tmp_path, **settings | {"train__steps": 2})] == [1, 2]
    with pytest.raises(ConfigError, match="start_from.*no such folder"):
        in_process(tmp_path / "new", **settings)


def test_what_a_run_cannot_begin_with_is_refused_before_it_starts(student, run, tmp_path):
    def refused(match: str, **settings) -> None:
        with pytest.raises((ConfigError, ValueError), match=match):
            in_process(tmp_path / "run", **SMALL | settings)

    bare = tmp_path / "bare"
    shutil.copytree(find(run).folder, bare)
    (bare / "vocabulary.json").unlink()
    refused("which tokenizer the ids .* not recorded there\n.*forest merge .*--model", curriculum__start_from=bare)
    forest.main(["merge", str(bare), f"--model={student}", "--out", str(tmp_path / "named")])
    assert content(tmp_path / "named") == content(find(run).folder) | {
        "vocabulary.json": content(tmp_path / "named")["vocabulary.json"]
    }
    assert vocabulary_of_forest(find(tmp_path / "named")).sha256 == vocabulary_of_model(student).sha256
    write_vocabulary(bare, Vocabulary("models/other", "0" * 64))
    refused("of the vocabulary of models/other", curriculum__start_from=bare)
    refused("set curriculum.pool=forest", curriculum__start_from=run, curriculum__pool="flat")
    refused("found .*; expected a run's folder", curriculum__start_from=tmp_path)
    swapped = {"data__validation": "carry_chain:train:8", "data__train": "carry_chain:heldout:8"}
    refused("questions of data.validation .* are in the forest", curriculum__start_from=run, **swapped)
    refused("states are longer than .*prune", curriculum__start_from=run, curriculum__min_remaining_tokens=75)
    sums = {"data__train": "arithmetic:train:8", "data__validation": "arithmetic:heldout:8", "teacher__oracle": "arithmetic"}
    refused("of carry_chain, this run's data sets of arithmetic", curriculum__start_from=run, **sums)


def test_shown_as_text_json_and_html(run, tmp_path, capsys):
    saved = read(run)
    forest.main(["show", str(run), "--limit=0", "--sort=success", "--tokens=4"])
    text = capsys.readouterr().out
    assert text.count("✂") == states(saved) and len(re.findall(r"^tree \d+", text, re.M)) == len(saved.trees)
    forest.main(["show", str(run), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["summary"]["states"] == states(saved) and len(shown["states"]) == len(list(saved.nodes()))
    row = next(row for row in shown["states"] if row["parent"] is not None)
    failed, start = row["provenance"], len(row["prompt_ids"])
    whole = row["prompt_ids"] + row["prefix_ids"]
    assert whole[failed["began"] :] + failed["failed_suffix_ids"] == failed["response_ids"] and failed["began"] >= start
    assert row["prefix"].endswith(row["new_text"]) and row["question"] in row["prompt_text"] and row["suffix"]
    page = tmp_path / "forest.html"
    forest.main(["show", str(run / "checkpoints" / "3"), "--html", str(page), "--tree=0"])
    html = page.read_text()
    assert "<script" not in html and "http" not in html and html.count("<details>") == html.count("</details>") == 1
    assert html.count("class='node") == len(next(iter(saved.trees.values())).nodes) - 1
    assert html.count("<div") == html.count("</div>")


def test_pruned_compared_and_exported(run, tmp_path, capsys):
    saved = read(run)
    forest.main(["prune", str(run), "--retired", "--max-nodes=2", "--out", str(tmp_path / "small"), "--reopen"])
    small = read(tmp_path / "small")
    assert 0 < states(small) <= len(saved.trees) and all(node.active for node in small.nodes())
    capsys.readouterr()
    forest.main(["diff", str(run), str(tmp_path / "small"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["states removed from common trees"] + found["summary"]["trees removed"] > 0
    assert len(found["differences"]) >= states(saved) - states(small) - len(saved.trees)
    forest.main(["export", str(run), "--out", str(tmp_path / "states.jsonl")])
    rows = dataset.read(f"verl:{tmp_path / 'states.jsonl'}")
    nodes = [node for node in saved.nodes() if node.parent is not None]
    assert len(rows) == len(nodes) == len((tmp_path / "states.jsonl").read_text().splitlines())
    problems = {tree.problem.question: tree.problem for tree in saved.trees.values()}
    assert all(problems[row.question].ground_truth == row.ground_truth for row in rows)
    lines = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    assert [line["prompt_ids"] + line["prefix_ids"] for line in lines] == [node.ids.tolist() for node in nodes]


def test_mistakes_are_named(run, tmp_path):
    def refused(match: str, *arguments: object) -> None:
        with pytest.raises(SystemExit, match=match):
            forest.main([str(argument) for argument in arguments])

    other = tmp_path / "other"
    (other / "tokenizer").mkdir(parents=True)
    (other / "tokenizer" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    refused("no such folder", "show", tmp_path / "absent")
    refused("another one", "show", run, f"--model={other / 'tokenizer'}")
    refused("given twice", "merge", run, run / "checkpoints" / "3", "--out", tmp_path / "out")
    refused("nothing to prune by", "prune", run, "--out", tmp_path / "out")
    refused("numbered from 0", "show", run, "--tree=99")
    shutil.copytree(run, other / "run")
    (other / "run" / "checkpoints" / "3" / "curriculum" / "nodes.npz").write_bytes(b"torn")
    assert find(other / "run").step == 2  # the newest that is whole
    refused("nodes.npz is of another size", "show", other / "run" / "checkpoints" / "3")
    (other / "run" / "checkpoints" / "2" / "manifest.json").unlink()
    refused("3: .*nodes.npz.*2: manifest.json is missing", "show", other / "run")


def test_a_vocabulary_is_what_ids_stand_for(run, tmp_path):
    made = {}
    for name, files in {
        "fast": {"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<e>"}]}},
        "unigram": {"tokenizer.json": {"model": {"vocab": [["a", -1.0], ["b", -2.0], ["<e>", 0.0]]}}},
        "slow": {"vocab.json": {"b": 1, "a": 0}, "added_tokens.json": {"<e>": 2}},
        "other": {"vocab.json": {"a": 1, "b": 0}, "added_tokens.json": {"<e>": 2}},
    }.items():
        (tmp_path / name).mkdir()
        for file, value in files.items():
            (tmp_path / name / file).write_text(json.dumps(value))
        made[name] = vocabulary_of_model(tmp_path / name).sha256
    assert made["fast"] == made["unigram"] == made["slow"] != made["other"]
    assert vocabulary_of_model(tmp_path) is None and vocabulary_of_forest(find(run)) is not None
