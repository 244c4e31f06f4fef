"""Looks into saved forests of hard states, and makes new ones of them.

    python -m deepgrpo.forest show RUN [--tree=3] [--sort=success] [--limit=10] [--json] [--html=forest.html]
    python -m deepgrpo.forest diff RUN RUN
    python -m deepgrpo.forest merge RUN RUN ... --out=FOLDER
    python -m deepgrpo.forest prune RUN --out=FOLDER --retired --stale=100 --max-nodes=16
    python -m deepgrpo.forest export RUN --out=states.jsonl

RUN is a run's folder (its newest complete checkpoint), one step's folder, or a saved forest. A run starts from any of these with
--config.curriculum.start_from=RUN. Works on the CPU, beside a running training. docs/forest.md says more.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from deepgrpo.config import folders
from deepgrpo.config.errors import shown
from deepgrpo.config.folders import Place, Vocabulary
from deepgrpo.config.streams import tool
from deepgrpo.curriculum import forest_state, forest_tools, forest_view
from deepgrpo.curriculum.forest_index import Tree
from deepgrpo.curriculum.forest_state import SavedForest
from deepgrpo.telemetry.log import Console
from deepgrpo.weights.files import new_folder, replace_text

HTML_TOKENS, TERMINAL_TOKENS = 100, 60  # of each text


@dataclasses.dataclass(frozen=True)
class Opened:
    """A forest that was found and read. vocabulary: of its ids; None if it is unknown."""

    place: Place
    saved: SavedForest
    vocabulary: Vocabulary | None

    @property
    def now(self) -> int:
        return forest_tools.last_step(self.saved) if self.place.step is None else self.place.step

    @property
    def title(self) -> str:
        return str(self.place.folder if self.place.run is None else f"{self.place.run}, step {self.place.step}")


def open_forest(path: pathlib.Path, model: pathlib.Path | None) -> Opened:
    """Finds and reads a forest; its ids are said to be of `model`'s tokenizer if that is given.

    Raises:
      FileNotFoundError, ValueError: nothing complete there; or the forest is known to be of another vocabulary than `model`'s.
    """
    place = folders.find(path)
    known = folders.vocabulary_of_forest(place)
    if model is not None:
        given = folders.vocabulary_of_model(model)
        if given is None:
            raise FileNotFoundError(f"--model: {model} holds no tokenizer")
        if known is not None and known.sha256 != given.sha256:
            raise ValueError(f"{path}: its ids are of the vocabulary of {known.model}; that of --model={model} is another one")
        known = given
    return Opened(place, forest_state.read(str(place.folder)), known)


def decoder_of(opened: Opened, ids: bool) -> forest_view.Decode | None:
    """None if only ids are to be shown.

    Raises:
      ValueError: the forest's tokenizer is unknown, or gone.
    """
    if ids:
        return None
    if opened.vocabulary is None:
        raise ValueError(
            f"{opened.place.folder}: which tokenizer its ids are of is unknown: name one with --model, or give --ids"
        )
    model = pathlib.Path(opened.vocabulary.model)
    found = folders.vocabulary_of_model(model)
    if found is None or found.sha256 != opened.vocabulary.sha256:
        what = "holds no tokenizer" if found is None else "holds another tokenizer by now"
        raise ValueError(f"{model}, whose tokenizer made {opened.place.folder}, {what}: name a copy with --model, or give --ids")
    return forest_view.decoder(model)


#### show


def show(args: argparse.Namespace) -> None:
    opened = open_forest(args.run, args.model)
    numbers = chosen_trees(opened.saved, args)
    usual = 0 if args.json else HTML_TOKENS if args.html else TERMINAL_TOKENS
    most = usual if args.tokens is None else args.tokens
    made = forest_view.rows(opened.saved, numbers, decoder_of(opened, args.ids), opened.now, most)
    if args.json:
        whole = {"forest": opened.title, "summary": forest_view.summary(opened.saved), "states": made}
        print(json.dumps(whole, default=np.ndarray.tolist))
        return
    if args.html:
        replace_text(args.html, forest_view.html_page(opened.saved, made, opened.title))
        print(f"{len(numbers)} trees, {len(made) - len(numbers)} states -> {args.html}")
        return
    console = Console()
    console.print(forest_view.summary_table(opened.saved, opened.title))
    for branch in forest_view.terminal_trees(made):
        console.print(branch)
    if len(numbers) < len(opened.saved.trees):
        console.print(f"{len(numbers)} of {len(opened.saved.trees)} trees shown; --limit=0 shows all, --tree=N one", style="dim")


def chosen_trees(saved: SavedForest, args: argparse.Namespace) -> list[int]:
    if args.tree is not None:
        if args.tree >= len(saved.trees):
            raise ValueError(f"--tree={args.tree}: the forest has {len(saved.trees)} trees, numbered from 0")
        return [args.tree]
    usual = 0 if args.json or args.html else 10
    limit = usual if args.limit is None else args.limit
    return forest_view.ordered(saved, args.sort)[: limit or None]


#### diff


def diff(args: argparse.Namespace) -> None:
    first, second = open_forest(args.first, args.model), open_forest(args.second, args.model)
    require_one_vocabulary([first, second])
    changes, numbers = forest_tools.diff(first.saved, second.saved)
    lines = [
        {
            "what": change.what,
            "question": change.tree.problem.question,
            "depth": len(change.node.ids) - len(change.tree.nodes[0].ids),
            "state_ids": change.node.ids.tolist(),
            "fields": change.fields,
        }
        for change in changes
    ]
    if args.json:
        print(json.dumps({"first": first.title, "second": second.title, "summary": numbers, "differences": lines}))
        return
    print(f"{first.title} -> {second.title}")
    for name, number in numbers.items():
        print(f"{number:8}  {name}")
    for line in lines[: args.limit or None]:
        changes = "; ".join(f"{name} {brief(old)} -> {brief(new)}" for name, (old, new) in line["fields"].items())
        print(f"{line['what']:13}  depth {line['depth']:4}  {line['question'][:80]!r}  {changes}")
    if args.limit and len(lines) > args.limit:
        print(f"and {len(lines) - args.limit} more; --limit=0 lists all")


def brief(value: Any) -> str:
    return f"({len(value)} ids)" if isinstance(value, list) else shown(str(value))


def require_one_vocabulary(forests: Sequence[Opened]) -> Vocabulary:
    """The vocabulary that all forests share.

    Raises:
      ValueError: one is unknown, or two differ; names them.
    """
    for opened in forests:
        if opened.vocabulary is None:
            raise ValueError(f"{opened.place.folder}: which tokenizer its ids are of is unknown; name it with --model")
        first = forests[0].vocabulary
        if opened.vocabulary.sha256 != first.sha256:
            raise ValueError(
                f"{forests[0].title} holds ids of {first.model}, {opened.title} of {opened.vocabulary.model}: their vocabularies "
                "differ, so equal ids are different texts"
            )
    return forests[0].vocabulary


#### merge, prune


def merge(args: argparse.Namespace) -> None:
    forests = [open_forest(path, args.model) for path in args.runs]
    vocabulary = require_one_vocabulary(forests)
    runs = [(opened.place.run or opened.place.folder).resolve() for opened in forests]
    if twice := next((run for i, run in enumerate(runs) if run in runs[:i]), None):
        raise ValueError(
            f"{twice} is given twice: what is in it twice would be counted twice; of a run, give its newest step only"
        )
    merged = forests[0].saved
    for opened in forests[1:]:
        merged = forest_tools.merge(merged, opened.saved)
    write(merged, args, vocabulary, forests)


def prune(args: argparse.Namespace) -> None:
    opened = open_forest(args.run, args.model)
    names = ("retired", "stale", "older_than", "longer_than", "max_nodes", "drop_trees")
    criteria = {name: getattr(args, name) for name in names}
    if not any(value not in (None, False, []) for value in criteria.values()):
        raise ValueError("nothing to prune by: give --retired, --stale, --older-than, --longer-than, --max-nodes or --drop-tree")
    write(forest_tools.prune(opened.saved, **criteria), args, require_one_vocabulary([opened]), [opened])


def write(saved: SavedForest, args: argparse.Namespace, vocabulary: Vocabulary, sources: Sequence[Opened]) -> None:
    if args.reopen:
        saved = forest_tools.reopened(saved)
    with new_folder(args.out) as folder:
        forest_state.write(saved, str(folder))
        folders.write_vocabulary(folder, vocabulary)
    for name, one in [*((opened.title, opened.saved) for opened in sources), (str(args.out), saved)]:
        states = sum(node.parent is not None for node in one.nodes())
        print(f"{len(one.trees):8} trees {states:8} states {one.num_events():8} waiting failures  {name}")
    print(f"a run begins with it by --config.curriculum.start_from={args.out}")


#### export


def export(args: argparse.Namespace) -> None:
    opened = open_forest(args.run, args.model)
    trees = list(opened.saved.trees.values())
    made = forest_view.rows(opened.saved, range(len(trees)), decoder_of(opened, ids=False), opened.now)
    kept = [row for row in made if (args.roots or row["parent"] is not None) and (row["active"] or not args.active)]
    if not kept:
        raise ValueError(f"{opened.title}: no state to export (it has {len(made)} with roots and retired ones; see --roots)")
    if args.out.exists():
        raise ValueError(f"--out: {args.out} exists already; remove it or name another file")
    lines = (json.dumps(exported(row, trees[row["tree"]]), default=np.ndarray.tolist) for row in kept)
    replace_text(args.out, "".join(f"{line}\n" for line in lines))
    print(f"{len(kept)} states -> {args.out}; their questions: --config.data.train=verl:{args.out} --config.data.template=chat")


def exported(row: dict[str, Any], tree: Tree) -> dict[str, Any]:
    """The row with the columns that `data.readers.verl` reads before it."""
    problem = tree.problem
    return {
        "data_source": problem.data_source,
        "prompt": [{"role": "user", "content": problem.question}],
        "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
        "extra_info": {**problem.extra, "index": problem.index},
        **row,
    }


#### Command line


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m deepgrpo.forest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)

    def command(function: Any, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(function.__name__, help=text, description=text)
        one.set_defaults(function=function)
        one.add_argument(
            "--model", type=pathlib.Path, help="Hugging Face folder with the ids' tokenizer (default: the forest's own)"
        )
        return one

    one = command(show, "Shows what is in a forest: a summary, then the tree of each prompt.")
    one.add_argument("run", type=pathlib.Path, metavar="RUN")
    one.add_argument("--tree", type=natural, help="only this one, by its number")
    one.add_argument("--sort", choices=sorted(forest_view.SORTS), default="made")
    one.add_argument("--limit", type=natural, help="trees shown; 0: all (the default of --json and --html; else 10)")
    usual = f"{HTML_TOKENS} in HTML, {TERMINAL_TOKENS} in the terminal"
    one.add_argument("--tokens", type=natural, help=f"shown of a text; 0: all (as --json does; default {usual})")
    one.add_argument("--ids", action="store_true", help="ids instead of texts; needs no tokenizer")
    output = one.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="everything, as one JSON object")
    output.add_argument("--html", type=pathlib.Path, metavar="FILE", help="one page that needs neither server nor network")

    one = command(diff, "Lists what the second forest has, lacks and has otherwise than the first.")
    one.add_argument("first", type=pathlib.Path, metavar="RUN")
    one.add_argument("second", type=pathlib.Path, metavar="RUN")
    one.add_argument("--limit", type=natural, default=20, help="differences listed; 0: all")
    one.add_argument("--json", action="store_true", help="everything, as one JSON object")

    one = command(merge, "Writes the union of forests of different runs (of a single one: a copy).")
    one.add_argument("runs", type=pathlib.Path, nargs="+", metavar="RUN")
    writes(one)

    one = command(prune, "Writes what is left of a forest. Ages are in steps before its newest one.")
    one.add_argument("run", type=pathlib.Path, metavar="RUN")
    one.add_argument("--retired", action="store_true", help="without mastered states and their failures")
    one.add_argument("--stale", type=natural, metavar="STEPS", help="without states not rolled out for so long")
    one.add_argument("--older-than", type=natural, metavar="STEPS", help="without states and failures made so long ago")
    one.add_argument("--longer-than", type=natural, metavar="TOKENS", help="without longer states, prompt included")
    one.add_argument("--max-nodes", type=natural, metavar="N", help="keep so many of a tree: active and young ones first")
    one.add_argument("--drop-tree", type=natural, action="append", default=[], dest="drop_trees", metavar="N", help="repeatable")
    writes(one)

    one = command(export, "Writes a data set, one line for each hard state; the reader verl of data.train reads its questions.")
    one.add_argument("run", type=pathlib.Path, metavar="RUN")
    one.add_argument("--out", type=pathlib.Path, required=True, help="JSONL file to make; must not exist")
    one.add_argument("--active", action="store_true", help="without retired states")
    one.add_argument("--roots", action="store_true", help="prompts without a prefix, too")
    return top


def writes(one: argparse.ArgumentParser) -> None:
    one.add_argument("--out", type=pathlib.Path, required=True, help="folder to make; must not exist")
    one.add_argument("--reopen", action="store_true", help="all states active again: for another student")


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, found {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    with tool():
        args.function(args)


if __name__ == "__main__":
    main()
