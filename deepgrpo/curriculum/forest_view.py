"""What people look at in a saved forest: each state as a row with its texts, in the terminal, in one HTML file, as data.

Texts are decoded for the eye only; the ids are what the forest holds.
"""

import html
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Branch

from deepgrpo.curriculum.forest_index import Node, Tree
from deepgrpo.curriculum.forest_state import SavedForest
from deepgrpo.curriculum.forest_tools import last_step
from deepgrpo.types import Ids, marks, plain

CUT = "✂"
OBSERVED = "⟦⟧"  # around what an environment wrote
_CONTEXT = 4  # tokens decoded before a piece: some decoders drop a text's leading space, and characters may span tokens
_OF_NODE = {"active": "active", "k_succ": "last_k_succ", "k_total": "last_k_total", "last_rollout_step": "rollout_clock"}
_OF_NODE |= {name: name for name in ("observations", "created_step", "last_success_step", "last_fail_step", "sft_updates")}
Decode = Callable[[list[list[int]]], list[str]]


def decoder(model: pathlib.Path) -> Decode:
    """Decodes many lists of ids at once, special tokens included, with the tokenizer of a Hugging Face folder.

    Raises:
      FileNotFoundError: no tokenizer there.
    """
    if (model / "tokenizer.json").is_file():  # the library itself: transformers takes seconds to import
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        return lambda lists: tokenizer.decode_batch(lists, skip_special_tokens=False)
    from deepgrpo.data.tokenizer import load_tokenizer

    slow = load_tokenizer(str(model))
    return lambda lists: [slow.decode(ids, clean_up_tokenization_spaces=False) for ids in lists]


def texts_after(pieces: Sequence[tuple[Ids, Ids]], decode: Decode) -> list[str]:
    """The text of each (context, ids) that `ids` add behind their context; what an environment wrote stands between brackets."""
    contexts = [plain(context[-_CONTEXT:]).tolist() for context, _ in pieces]
    wholes = [context + plain(ids).tolist() for context, (_, ids) in zip(contexts, pieces, strict=True)]
    found = []
    for (_, ids), head, whole in zip(pieces, decode(contexts), decode(wholes), strict=True):
        # A character that is cut in the middle shows as a mark of its own in the head: then the piece is decoded by itself.
        text = whole[len(head) :] if whole.startswith(head) else decode([plain(ids).tolist()])[0]
        found.append(text if marks(ids) is None else _bracketed(ids, decode))
    return found


def _bracketed(ids: Ids, decode: Decode) -> str:
    """The text of ids with marks, piece by piece."""
    ends = np.flatnonzero(np.diff(ids < 0)) + 1
    pieces = np.split(ids, ends)
    texts = decode([plain(piece).tolist() for piece in pieces])
    return "".join(f"{OBSERVED[0]}{t}{OBSERVED[1]}" if piece[0] < 0 else t for piece, t in zip(pieces, texts, strict=True))


#### Rows


def rows(saved: SavedForest, trees: Sequence[int], decode: Decode | None, now: int, most: int = 0) -> list[dict[str, Any]]:
    """One row for each state of the given trees (numbers in insertion order), parents before children; `*_ids` are int32[len].

    depth: tokens of the locked prefix. k_succ, k_total: of the last group, None if there was none. age: steps since it was made,
    at step `now`. prefix: the whole locked prefix, whose last `new` tokens (`new_text`) the parent lacks. provenance: the failed
    response that it is a part of (`response_ids`, which began at token `began` of the state, None if that can't be told), and
    what the student wrote after the cut (`failed_suffix`). Texts are absent without
    `decode`; with `most` only what a view shows has a text, of so many tokens.
    """
    numbered = list(saved.trees.values())
    made = []
    for number in trees:
        sizes = {node.id: len(node.ids) for node in numbered[number].nodes}
        made += [_row(number, numbered[number], node, sizes, now) for node in numbered[number].nodes]
    if decode is not None:
        _add_texts(made, decode, most)
    return made


def _row(number: int, tree: Tree, node: Node, sizes: dict[int, int], now: int) -> dict[str, Any]:
    start = len(tree.nodes[0].ids)
    row = {
        "tree": number,
        "node": node.id,
        "parent": node.parent,
        "depth": len(node.ids) - start,
        **{name: getattr(node, field) for name, field in _OF_NODE.items()},
        "age": now - node.created_step,
        "waiting_failures": len(node.waiting),
        "question": tree.problem.question,
        "prompt_ids": node.ids[:start],
        "prefix_ids": node.ids[start:],
        "suffix_ids": node.ids[:0],
        "new": 0,
        "reward": None,
        "provenance": None,
    }
    if (origin := node.origin) is not None:
        row |= {"suffix_ids": origin.suffix_ids, "reward": origin.reward, "new": len(node.ids) - sizes[node.parent]}
        row["provenance"] = {
            "event": origin.event,
            "step": origin.event_step,
            "began": began_at(node),
            "response_ids": origin.response_ids,
            "failed_suffix_ids": origin.failed_suffix_ids,
        }
    return row


def began_at(node: Node) -> int | None:
    """Where in a state's ids the failed response began whose prefix closes it; None if the response does not end the state so."""
    origin = node.origin
    began = len(node.ids) - (len(origin.response_ids) - len(origin.failed_suffix_ids))
    kept = node.ids[max(began, 0) :]
    return began if began >= 0 and (kept == origin.response_ids[: len(kept)]).all() else None


def _add_texts(made: Sequence[dict[str, Any]], decode: Decode, most: int) -> None:
    places, pieces = [], []  # where each text goes, and what it is the text of
    for row in made:
        prompt, prefix, new, provenance = row["prompt_ids"], row["prefix_ids"], row["new"], row["provenance"]
        if provenance is None:
            row |= {"prefix": "", "new_text": "", "suffix": ""}
            places.append((row, "prompt_text"))
            pieces.append((prompt[:0], prompt))
            continue
        added = prefix[-min(new, most or new) :]
        places += [(row, "new_text"), (row, "suffix"), (provenance, "failed_suffix")]
        pieces.append((prefix[: -len(added)] if len(prefix) > len(added) else prompt, added))
        pieces += [(prefix, ids[: most or None]) for ids in (row["suffix_ids"], provenance["failed_suffix_ids"])]
        if not most:
            places.append((row, "prefix"))
            pieces.append((prompt, prefix))
    for (target, name), text in zip(places, texts_after(pieces, decode), strict=True):
        target[name] = text
    prompts = {row["tree"]: row["prompt_text"] for row in made if row["parent"] is None}
    for row in made:
        row["prompt_text"] = prompts[row["tree"]]
        if most and row["provenance"] is not None:
            row["new_text"] = "…" * (row["new"] > most) + row["new_text"]
            row["suffix"] += "…" * (len(row["suffix_ids"]) > most)
            row["provenance"]["failed_suffix"] += "…" * (len(row["provenance"]["failed_suffix_ids"]) > most)


#### Summary and order


def summary(saved: SavedForest) -> dict[str, Any]:
    nodes = list(saved.nodes())
    states = [node for node in nodes if node.parent is not None]
    seen = [node.last_k_succ / node.last_k_total for node in states if node.last_k_total]
    depths = sorted(len(node.ids) - len(tree.nodes[0].ids) for tree in saved.trees.values() for node in tree.nodes[1:])
    return {
        "trees": len(saved.trees),
        "states": len(states),
        "active states": sum(node.active for node in states),
        "retired states": sum(not node.active for node in states),
        "never rolled out": sum(not node.observations for node in states),
        "mean success of the last groups": round(sum(seen) / len(seen), 3) if seen else None,
        "prefix tokens (median, most)": f"{depths[len(depths) // 2]}, {depths[-1]}" if depths else "-",
        "failures waiting for the teacher": saved.num_events(),
        "corrections accepted, of dispatched": f"{saved.counters.succeeded} of {saved.counters.dispatched}",
        "newest step": last_step(saved),
    }


SORTS: dict[str, Callable[[Tree], Any]] = {
    "made": lambda tree: tree.created_step,
    "updated": lambda tree: -tree.last_updated_step,
    "states": lambda tree: -len(tree.nodes),
    "active": lambda tree: -sum(node.active for node in tree.nodes[1:]),
    "depth": lambda tree: -max(len(node.ids) - len(tree.nodes[0].ids) for node in tree.nodes),
    "failures": lambda tree: -sum(len(node.waiting) for node in tree.nodes),
    "success": lambda tree: -max((node.last_k_succ / node.last_k_total for node in tree.nodes if node.last_k_total), default=-1),
}


def ordered(saved: SavedForest, sort: str) -> list[int]:
    """Numbers of the trees by one of SORTS; ties in insertion order."""
    trees = list(saved.trees.values())
    return sorted(range(len(trees)), key=lambda number: SORTS[sort](trees[number]))


#### Terminal


def summary_table(saved: SavedForest, title: str) -> Table:
    table = Table(title=escape(title), show_header=False)
    for name, value in summary(saved).items():
        table.add_row(name, "-" if value is None else str(value))
    return table


def terminal_trees(made: Sequence[dict[str, Any]]) -> list[Branch]:
    """One for each prompt, of rows in the order of `rows`."""
    branches: dict[int, Branch] = {}
    roots = []
    for row in made:
        label = Text(f"tree {row['tree']}  " if row["parent"] is None else "")
        label.append(_facts(row), style="bold" if row["active"] else "dim")
        if row["parent"] is None:
            label.append("\n" + row["question"])
            branches[row["node"]] = Branch(label)
            roots.append(branches[row["node"]])
            continue
        new, suffix, failed = _texts(row)
        label.append(f"\n{new}", style="green").append(f" {CUT} ", style="bold red").append(suffix, style="cyan")
        label.append(f"\nnot: {failed}", style="red")
        branches[row["node"]] = branches[row["parent"]].add(label)
    return roots


def _facts(row: dict[str, Any]) -> str:
    seen = f"{row['k_succ']}/{row['k_total']} right, seen {row['observations']}x" if row["observations"] else "never rolled out"
    life = "active" if row["active"] else "retired"
    facts = [f"state {row['node']}", f"{row['depth']} tokens", life, seen, f"age {row['age']}"]
    if row["waiting_failures"]:
        facts.append(f"{row['waiting_failures']} failures wait")
    if row["provenance"]:
        facts.append(f"from a failure of step {row['provenance']['step']} (event {row['provenance']['event']})")
    return ", ".join(facts)


def _texts(row: dict[str, Any]) -> tuple[str, str, str]:
    """What the state adds to its parent, the teacher's continuation, what the student had written instead; ids without texts."""
    if "new_text" in row:
        return row["new_text"], row["suffix"], row["provenance"]["failed_suffix"]
    ids = row["prefix_ids"][-row["new"] :], row["suffix_ids"], row["provenance"]["failed_suffix_ids"]
    return tuple(str(part.tolist()) for part in ids)


#### HTML

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222}
table{border-collapse:collapse}td{padding:.1em .8em;border-bottom:1px solid #ddd}
details{margin:.3em 0;padding:.2em .6em;border-left:3px solid #bbb}
summary{cursor:pointer}
.node{margin:.5em 0 .5em 1.4em;padding:.2em .6em;border-left:3px solid #7a7}.retired{border-color:#ccc;color:#777}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2em 0;font:13px/1.4 ui-monospace,monospace}
.new{background:#e3f4e3}.cut{color:#c00;font-weight:bold}.suffix{background:#e3eefb}.failed{background:#fbe5e3}
.facts{color:#555;font-size:.92em}.observed{background:#fdf3d0}
"""


def html_page(saved: SavedForest, made: Sequence[dict[str, Any]], title: str) -> str:
    """One self-contained page, of rows in the order of `rows`: no script, nothing fetched."""
    inside: dict[int | None, list[str]] = {}  # the blocks in that of a state, last one first; None: the trees
    for row in reversed(made):
        blocks = "".join(reversed(inside.pop(row["node"], [])))
        inside.setdefault(row["parent"], []).append(_html_block(row, blocks))
    facts = [(name, "-" if value is None else str(value)) for name, value in summary(saved).items()]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><table>"
        + "".join(f"<tr><td>{html.escape(name)}<td>{html.escape(value)}</tr>" for name, value in facts)
        + "</table><p>Each prompt is a block with its states inside: <span class=new>what the state adds to its parent</span> "
        f"<span class=cut>{CUT}</span> <span class=suffix>the teacher's continuation</span>, "
        "<span class=failed>what the student had written instead</span>, and <span class=observed>an environment's words</span>."
        + "".join(reversed(inside.get(None, [])))
        + "</html>\n"
    )


def _shown(text: str) -> str:
    return text.replace(OBSERVED[0], "<span class=observed>").replace(OBSERVED[1], "</span>")


def _html_block(row: dict[str, Any], children: str) -> str:
    facts = html.escape(_facts(row))
    if row["parent"] is None:
        question = html.escape(row["question"])
        return f"<details><summary>tree {row['tree']}: {question} <span class=facts>{facts}</span></summary>{children}</details>"
    new, suffix, failed = (_shown(html.escape(text)) for text in _texts(row))
    return (
        f"<div class='node{'' if row['active'] else ' retired'}'><div class=facts>{facts}</div><pre><span class=new>{new}</span>"
        f"<span class=cut> {CUT} </span><span class=suffix>{suffix}</span></pre><pre class=failed>{failed}</pre>{children}</div>"
    )
