"""Records for reading, as JSON lines: rollouts and validations of a step, hard states, the teacher beside the student.

The fields input, output, score, reward, step, finished, completed, task_id and data_source of a rollout are those of the released
implementation's dumps; the rest is ours.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deepgrpo.config.errors import CONTROL
from deepgrpo.curriculum.base import Curriculum
from deepgrpo.environments.base import Trace
from deepgrpo.telemetry.log import no_end
from deepgrpo.telemetry.recover import Pair
from deepgrpo.types import Group, Ids, Rollout, plain

Decode = Callable[[list[int]], str]  # ids to text, special tokens kept

DUMP_STATES, DUMP_DEEPER = 16, 4  # rolled-out states of a dump, and deepest states of the forest beside them
DUMP_ROLLOUTS = 8  # rollouts shown of a state
DUMP_CHARACTERS = 4000  # of a text; the rest is cut, which is said
TABLE_STATES = 20  # rows of a table of the teacher's continuations

COPIED = ("tree", "node", "parent", "depth_edges", "depth_tokens", "descendants", "deepest_depth", "active", "created_step")
COPIED += ("observations", "last_k_succ", "last_k_total", "success_rate", "sft_updates", "last_rollout_step", "last_success_step")
COPIED += ("last_fail_step", "last_dispatch_step", "last_sft_step", "waiting_events")
COPIED += ("lineage", "lineage_truncated", "children", "children_truncated")


def rollout_records(groups: Sequence[Group], step: int, decode: Decode) -> list[dict[str, Any]]:
    """Everything about a step's rollouts, in group order: texts, ids, verdict, and the hard state they started from."""
    return [
        record(group, rollout, step, decode)
        | {
            "prompt_ids": group.prompt.ids.tolist(),
            "response_ids": rollout.completion.ids.tolist(),
            "injected": group.prompt.injected,
            "node": None if group.prompt.node is None else str(group.prompt.node),
            "locked_length": group.prompt.locked,
            "locked_text": decode(locked_ids(group).tolist()),
            "weight_version": rollout.completion.version,
        }
        for group in groups
        for rollout in group.rollouts
    ]


def validation_records(groups: Sequence[Group], step: int, decode: Decode) -> list[dict[str, Any]]:
    """The answers of a validation, in group order; `statistics.validation_metrics` is computed from these."""
    return [record(group, rollout, step, decode) for group in groups for rollout in group.rollouts]


def record(group: Group, rollout: Rollout, step: int, decode: Decode) -> dict[str, Any]:
    completion, grade, problem = rollout.completion, rollout.grade, group.prompt.problem
    return {
        "step": step,
        "data_source": problem.data_source,
        "task_id": problem.index,
        "input": decode(group.prompt.ids.tolist()),
        "output": decode(completion.ids.tolist()),
        "score": grade.reward,
        "reward": grade.reward,
        "completed": grade.completed,
        "finished": completion.finish_reason == "stop",
        "finish_reason": completion.finish_reason,
        "reason": grade.reason,
        "answer": grade.answer,
        "ground_truth": problem.ground_truth,
        "response_length": len(completion.ids),
        "group": group.prompt.group_id,
    } | ({} if rollout.episode is None else {"end": rollout.end, "turns": conversation(rollout.episode)})


def conversation(episode: Trace) -> list[dict[str, str]]:
    return [{"who": who, "text": text} for who, text in episode.parts]


def locked_ids(group: Group) -> Ids:
    return group.prompt.ids[len(group.prompt.problem.prompt_ids) :]


#### Hard states


@dataclasses.dataclass(frozen=True)
class StateDump:
    """Makes records of hard states. threshold: success is reward > threshold."""

    decode: Decode
    stop_ids: Sequence[int]
    threshold: float

    def records(self, groups: Sequence[Group], pairs: Sequence[Pair], curriculum: Curriculum, step: int) -> list[dict[str, Any]]:
        """Records of the injected groups of a step, before the curriculum observes them: where a state comes from (lineage,
        failed rollout, teacher's suffix), where it stands (counts, clocks), and what the step's rollouts made of it.

        Groups with a pair come first, each followed by its root; then the deepest states of the forest.
        """
        paired = {pair.prefix.prompt.group_id: pair for pair in pairs}
        injected = [group for group in groups if group.prompt.injected and group.prompt.stream == "main"]
        injected.sort(key=lambda group: group.prompt.group_id not in paired)  # stable
        made, shown = [], set()
        for group in injected[:DUMP_STATES]:
            about = curriculum.look_up(group.prompt.node)
            if not about:
                continue
            shown.add(group.prompt.node)
            pair = paired.get(group.prompt.group_id)
            source = "forest_root" if about["parent"] is None else "forest_prefix"
            made.append(self._record(about, source, step, group, pair))
            if pair:
                made.append(self._record(curriculum.look_up(about["tree"]), "paired_root", step, pair.root, pair))
        deep = [node for node in curriculum.deepest(DUMP_DEEPER + len(shown)) if node not in shown][:DUMP_DEEPER]
        return made + [self._record(curriculum.look_up(node), "forest_debug_deeper", step) for node in deep]

    def _record(
        self, about: Mapping[str, Any], source: str, step: int, group: Group | None = None, pair: Pair | None = None
    ) -> dict[str, Any]:
        problem, ids, suffix, reward = about["problem"], about["ids"], about["suffix_ids"], about["reward"]
        locked = ids[len(problem.prompt_ids) :]
        k_succ, k_total = group.successes(self.threshold) if group else (None, None)
        return {
            "step": step,
            "source": source,
            **{name: about[name] for name in COPIED},
            "prompt_sha1": sha1(problem.prompt_ids),
            "state_sha1": sha1(ids),
            "data_source": problem.data_source,
            "task_id": problem.index,
            "ground_truth": problem.ground_truth,
            "prompt_length": len(problem.prompt_ids),
            "state_length": len(ids),
            "teacher_suffix_length": None if suffix is None else len(suffix),
            "teacher_suffix_reward": reward,
            "teacher_suffix_finished": suffix is not None and int(suffix[-1]) in self.stop_ids,
            "teacher_suffix_completed": reward is not None and reward > self.threshold,
            "original_prompt": self._text(problem.prompt_ids),
            "locked_prefix": self._text(locked),
            "augmented_prompt": self._text(ids),
            "teacher_suffix": self._text(suffix),
            "teacher_full_response": self._text(locked, suffix),
            "original_failed_suffix": self._text(about["failed_suffix_ids"]),
            "k_succ": k_succ,
            "k_total": k_total,
            "rate": k_succ / k_total if k_total else None,
            "rollouts": [
                {
                    "row": row,
                    "score": rollout.reward,
                    "finished": rollout.completion.finish_reason == "stop",
                    "completed": rollout.grade.completed,
                    "response": self._text(rollout.completion.ids),
                    "full_response": self._text(locked_ids(group), rollout.completion.ids),
                }
                for row, rollout in enumerate(group.rollouts[:DUMP_ROLLOUTS] if group else ())
            ],
            "pair": pair and self._pair(pair),
        }

    def _pair(self, pair: Pair) -> dict[str, Any]:
        (k, n), (root_k, root_n) = (group.successes(self.threshold) for group in (pair.prefix, pair.root))
        counts = {"prefix_k_succ": k, "prefix_k_total": n, "root_k_succ": root_k, "root_k_total": root_n}
        return counts | {"prefix_minus_root": k / n - root_k / root_n if n and root_n else None}

    def _text(self, *pieces: Ids | None) -> str | None:
        """Text of ids, its end cut where it is too long, which is said; None if a piece is unknown."""
        if any(piece is None for piece in pieces):
            return None
        text = self.decode([token for piece in pieces for token in plain(piece).tolist()])
        cut = len(text) - DUMP_CHARACTERS
        return f"{text[:DUMP_CHARACTERS]} [... {cut} of {len(text)} characters cut]" if cut > 0 else text

    def teacher_table(self, groups: Sequence[Group], curriculum: Curriculum, step: int) -> list[dict[str, Any]]:
        """What the teacher kept of a failed answer, what it wrote instead, what the student made of what it kept: a record for
        each of the first groups that start from a prefix which a teacher has continued, before the curriculum observes them."""
        made = []
        for group in groups:
            about = curriculum.look_up(group.prompt.node) if group.prompt.injected else {}
            if about.get("suffix_ids") is None or len(made) == TABLE_STATES:
                continue
            problem, (k_succ, k_total) = group.prompt.problem, group.successes(self.threshold)
            texts = {"shared_prefix": locked_ids(group), "student_suffix": about["failed_suffix_ids"]}
            texts |= {"teacher_suffix": about["suffix_ids"]}
            made.append(
                {
                    "step": step,
                    "data_source": problem.data_source,
                    "task_id": problem.index,
                    "question": problem.question,
                    "ground_truth": problem.ground_truth,
                    **{name: self.decode(plain(ids).tolist()) for name, ids in texts.items()},
                    "teacher_reward": about["reward"],
                    "student_suffix_length": len(about["failed_suffix_ids"]),
                    "teacher_suffix_length": len(about["suffix_ids"]),
                    "created_step": about["created_step"],
                    "k_succ": k_succ,
                    "k_total": k_total,
                    "continuations": [
                        {"score": rollout.reward, "text": self.decode(rollout.completion.ids.tolist())}
                        for rollout in group.rollouts
                    ],
                }
            )
        return made


def sha1(ids: Ids) -> str:
    """SHA-1 of the ids, joined by commas."""
    return hashlib.sha1(",".join(map(str, ids.tolist())).encode()).hexdigest()


#### Files


def write(path: str | pathlib.Path, records: Iterable[dict[str, Any]]) -> None:
    """Writes JSON lines, whole or not at all; a step that is repeated after a resume replaces its file."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with open(part, "w", encoding="utf-8", errors="backslashreplace") as file:  # half a character is JSON's own escape then
        for entry in records:
            text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
            file.write(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")  # for whoever prints the file
    part.replace(path)


def show(path: str | pathlib.Path, records: Iterable[dict[str, Any]]) -> bool:
    """`write` for reading matter, which is not worth a run: False, and a warning, if it could not be written."""
    with no_end(f"{pathlib.Path(path).parent}"):
        write(path, records)
        return True
    return False


def show_states(path: pathlib.Path, records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Writes a step's records of states and returns `prefix_debug_dump/*`."""
    written = records if show(path, records) else []
    deeper = sum(record["source"] == "forest_debug_deeper" for record in written)
    return {"prefix_debug_dump/records": float(len(written)), "prefix_debug_dump/deeper_records": float(deeper)}


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
