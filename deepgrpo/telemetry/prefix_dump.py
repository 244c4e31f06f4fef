"""Hard states for reading: `<step>.jsonl`, a record a rolled-out state, its root beside it where both were, then deep states.

A record tells where a state comes from (lineage, failed rollout, teacher's suffix), where it stands (counts, clocks), and what
the step's rollouts made of it.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from deepgrpo.curriculum.base import Curriculum
from deepgrpo.telemetry import dumps
from deepgrpo.telemetry.dumps import Decode
from deepgrpo.telemetry.paired import Pair
from deepgrpo.types import Group, Ids, Problem

COUNTS = ("active", "created_step", "observations", "last_k_succ", "last_k_total", "success_rate", "sft_updates")
COUNTS += ("last_rollout_step", "last_success_step", "last_fail_step", "last_dispatch_step", "last_sft_step", "waiting_events")
PLACE = ("depth_edges", "depth_tokens", "descendants", "deepest_depth")
FAMILY = ("lineage", "lineage_truncated", "children", "children_truncated")


@dataclasses.dataclass(frozen=True)
class PrefixDump:
    """Makes the records. See `config.diagnostics` for the limits; threshold: success is reward > threshold."""

    decode: Decode
    stop_ids: tuple[int, ...]
    threshold: float
    prefixes: int
    deeper: int
    rollouts: int
    characters: int
    full_text: bool
    token_ids: bool
    max_token_ids: int

    def records(self, groups: Sequence[Group], pairs: Sequence[Pair], curriculum: Curriculum, step: int) -> list[dict[str, Any]]:
        """Records of the injected groups of a step, before the curriculum observes them; those with a pair come first."""
        paired = {pair.prefix.prompt.group_id: pair for pair in pairs}
        injected = [group for group in groups if group.prompt.injected and group.prompt.stream == "main"]
        injected.sort(key=lambda group: group.prompt.group_id not in paired)  # stable
        made, shown = [], set()
        for group in injected[: self.prefixes]:
            about = curriculum.look_up(group.prompt.node)
            if not about:
                continue
            shown.add(group.prompt.node)
            pair = paired.get(group.prompt.group_id)
            source = "forest_root" if about["parent"] is None else "forest_prefix"
            made.append(self._record(about, source, step, group) | self._pair(pair))
            if pair:
                root = curriculum.look_up(about["tree"])
                made.append(self._record(root, "paired_root", step, pair.root) | self._pair(pair))
        deep = [node for node in curriculum.deepest(self.deeper + len(shown)) if node not in shown][: self.deeper]
        return made + [self._record(curriculum.look_up(node), "forest_debug_deeper", step, None) for node in deep]

    def _record(self, about: Mapping[str, Any], source: str, step: int, group: Group | None) -> dict[str, Any]:
        problem, ids = about["problem"], about["ids"]
        return {
            "step": step,
            "source": source,
            "tree": about["tree"],
            "node": about["node"],
            "parent": about["parent"],
            "prompt_sha1": sha1(problem.prompt_ids),
            "state_sha1": sha1(ids),
            "data_source": problem.data_source,
            "task_id": problem.index,
            "ground_truth": problem.ground_truth,
            **{name: about[name] for name in PLACE + COUNTS + FAMILY},
            "prompt_length": len(problem.prompt_ids),
            "state_length": len(ids),
            **self._teacher(about, problem),
            **self._texts(about, problem),
            **self._group(group, problem),
        }

    def _teacher(self, about: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        suffix, reward = about["suffix_ids"], about["reward"]
        return {
            "teacher_suffix_length": None if suffix is None else len(suffix),
            "teacher_suffix_reward": reward,
            "teacher_suffix_finished": suffix is not None and int(suffix[-1]) in self.stop_ids,
            "teacher_suffix_completed": reward is not None and reward > self.threshold,
        }

    def _texts(self, about: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
        locked = about["ids"][len(problem.prompt_ids) :]
        parts = {
            "original_prompt": [problem.prompt_ids],
            "locked_prefix": [locked],
            "augmented_prompt": [about["ids"]],
            "teacher_suffix": [about["suffix_ids"]],
            "teacher_full_response": [locked, about["suffix_ids"]],
            "original_failed_suffix": [about["failed_suffix_ids"]],
        }
        known = {name: pieces for name, pieces in parts.items() if all(piece is not None for piece in pieces)}
        texts = {name: self._text(*known[name]) if name in known else None for name in parts}
        if self.token_ids:
            texts["state_ids"] = self._ids(about["ids"])
            texts["teacher_suffix_ids"] = None if about["suffix_ids"] is None else self._ids(about["suffix_ids"])
        return texts

    def _group(self, group: Group | None, problem: Problem) -> dict[str, Any]:
        if group is None:
            return {"k_succ": None, "k_total": None, "rate": None, "rollouts": []}
        k_succ, k_total = group.successes(self.threshold)
        locked = group.prompt.ids[len(problem.prompt_ids) :]
        rollouts = [
            {
                "row": row,
                "score": rollout.reward,
                "finished": rollout.completion.finish_reason == "stop",
                "completed": rollout.grade.completed,
                "response": self._text(rollout.completion.ids),
                "full_response": self._text(locked, rollout.completion.ids),
            }
            | ({"response_ids": self._ids(rollout.completion.ids)} if self.token_ids else {})
            for row, rollout in enumerate(group.rollouts[: self.rollouts])
        ]
        rate = k_succ / k_total if k_total else None
        return {"k_succ": k_succ, "k_total": k_total, "rate": rate, "rollouts": rollouts}

    def _pair(self, pair: Pair | None) -> dict[str, Any]:
        if pair is None:
            return {"pair": None}
        prefix, root = (group.successes(self.threshold) for group in (pair.prefix, pair.root))
        both = bool(prefix[1] and root[1])
        return {
            "pair": {
                "prefix_k_succ": prefix[0],
                "prefix_k_total": prefix[1],
                "root_k_succ": root[0],
                "root_k_total": root[1],
                "prefix_minus_root": prefix[0] / prefix[1] - root[0] / root[1] if both else None,
            }
        }

    def _text(self, *pieces: Ids) -> str:
        """Text of ids, its end cut where it is too long, which is said."""
        text = self.decode([token for piece in pieces for token in piece.tolist()])
        cut = 0 if self.full_text else max(len(text) - self.characters, 0)
        return f"{text[: self.characters]} [... {cut} of {len(text)} characters cut]" if cut else text

    def _ids(self, ids: Ids) -> list[int]:
        return ids[: self.max_token_ids].tolist()


def sha1(ids: Ids) -> str:
    """SHA-1 of the ids, joined by commas."""
    return hashlib.sha1(",".join(map(str, ids.tolist())).encode()).hexdigest()


def write(path: pathlib.Path, records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Writes a step's records and returns `prefix_debug_dump/*`."""
    if not dumps.show(path, records):
        return {"prefix_debug_dump/records": 0.0, "prefix_debug_dump/deeper_records": 0.0}
    deeper = sum(record["source"] == "forest_debug_deeper" for record in records)
    return {"prefix_debug_dump/records": float(len(records)), "prefix_debug_dump/deeper_records": float(deeper)}


def create(config: ml_collections.ConfigDict, decode: Decode, stop_ids: Sequence[int]) -> PrefixDump:
    """From the whole configuration."""
    keys = config.diagnostics
    return PrefixDump(
        decode,
        tuple(stop_ids),
        config.rewards.threshold,
        prefixes=keys.dump_prefixes,
        deeper=keys.dump_deeper,
        rollouts=keys.dump_rollouts,
        characters=keys.dump_characters,
        full_text=keys.dump_full_text,
        token_ids=keys.dump_token_ids,
        max_token_ids=keys.dump_max_token_ids,
    )
