"""The worker on every pool that sends it failures: recorded order of calls, counters, and what the pools hold afterwards."""

import re

import pytest

from deepgrpo.curriculum.failed_pool import FailedPool, FailedRollout
from deepgrpo.teacher.annotate import Outcome
from deepgrpo.teacher.worker import TeacherWorker
from deepgrpo.types import Problem, as_ids
from tests.curriculum import made
from tests.curriculum.replay import assert_close
from tests.teacher.fakes import Script, corrected, teacher_cases, until


def problem(prompt):
    return Problem(0, "trace", as_ids(prompt), "", "")


class ForestMode:
    """labels: of the failures, in the order in which they are numbered. found: what the pools hold, in the trace's words."""

    def __init__(self, args):
        self.pool, self.labels = made.forest(), []
        for root in args["roots"]:
            responses = [as_ids(failed["response_ids"]) for failed in root["failed"]]
            self.labels += [failed["event"] for failed in root["failed"]]
            self.pool.observe_root(problem(root["prompt"]), 0, 4, args["observe_step"], responses)
        self.curriculum = self.pool

    def found(self, result):
        metrics = self.pool.metrics()
        nodes = [node for tree in made.describe(self.pool) for node in tree["nodes"] if node["origin"] is not None]
        children = [{"node": node["ids"].tolist(), "created_step": node["created_step"]} for node in nodes]
        order = [child["node"] for child in result["children"]]
        return {
            "pool": {name: metrics[name] for name in result["pool"]},
            "children": sorted(children, key=lambda child: order.index(child["node"])),
        }


class ChainMode:
    def __init__(self, args):
        self.pool, self.labels = made.create("chain"), []
        for root in args["roots"]:
            self.labels += [failed["rollout"] for failed in root["failed"]]
            responses = [as_ids(range(failed["response_len"])) for failed in root["failed"]]
            self.pool.start_chain(problem(root["prompt"]), responses, 3)
        self.curriculum = self.pool

    def found(self, result):
        chains = [
            {"prompt": c.problem.prompt_ids.tolist(), "state": c.state, "active": c.nodes[-1].ids.tolist()}
            for c in self.pool.chains.values()
        ]
        return {"chains": chains}


def feed(pool, text):
    """Fills a pool as "step1: a([1]) b([2]); ...; responses [5,6]" says; returns the labels."""
    labels, response = [], as_ids([int(i) for i in re.search(r"responses \[([\d,]+)\]", text)[1].split(",")])
    for step, entries in re.findall(r"step(\d+): ([^;]+)", text):
        for label, prompt in re.findall(r"(\w+)\(\[([\d,]+)\]\)", entries):
            labels.append(label)
            prompt_ids = [int(i) for i in prompt.split(",")]
            pool.add([FailedRollout(problem(prompt_ids), label, as_ids(prompt_ids), response)], int(step))
    return labels


class FailedPoolMode:
    """A pool that corrects the rollouts of a pool of failures."""

    def __init__(self, args):
        self.flat = args["mode"] == "flat"
        self.curriculum = made.create("flat" if self.flat else "suffixes")
        self.curriculum.failed = FailedPool(priority=args["failed_pool"] == "priority")
        self.labels = feed(self.curriculum.failed, args["feed"])

    def found(self, result):
        if self.flat:
            entries = self.curriculum.entries.values()
            return {"entries": [{"state_ids": e.state_ids.tolist(), "initial_p_hat": e.initial_p_hat} for e in entries]}
        names = {"prompt_ids": "state_ids", "prefix_ids": "prefix_ids", "suffix_ids": "suffix_ids"}
        return {
            "entries": [{k: getattr(e, name).tolist() for k, name in names.items()} for e in self.curriculum.annotated.entries]
        }


MODES = {"forest": ForestMode, "chain": ChainMode, "flat": FailedPoolMode, "branch_points": FailedPoolMode}


def deltas(read, previous):
    """What a trainer makes of two reads: totals of this one, growth since the last."""
    totals = {
        k: read[k] for k in ("teacher_worker/total_attempted", "teacher_worker/total_succeeded", "teacher_worker/success_rate")
    }
    growth = {
        name: read[f"teacher_worker/total_{name}"] - previous[f"teacher_worker/total_{name}"]
        for name in ("attempted", "succeeded")
    }
    return totals | {f"teacher_worker/step_{name}": value for name, value in growth.items()}


@pytest.mark.parametrize("args, result", teacher_cases("worker_modes"))
def test_golden_worker_modes(args, result):
    mode = MODES[args["mode"]](args)

    def say(failed):
        scripted = args["annotator"][mode.labels[failed.failure_id]]
        if scripted == "raise":
            raise RuntimeError("scripted")
        return Outcome("reward_too_low") if scripted is None else corrected(failed, scripted["match"], scripted["suffix"])

    script = Script(say)
    worker = TeacherWorker(mode.curriculum, script, max_concurrent=args["concurrency"], strict_reference=True)
    worker.step = args["worker_step"] if "worker_step" in args else 7
    nothing = worker.metrics()
    worker.start()
    until(lambda: len(script.calls) >= len(result["call_order"]) and not mode.curriculum.pending(), "the worker to be asked")
    assert worker.stop(10.0)
    assert [mode.labels[event] for event in script.calls] == result["call_order"]
    first, second = worker.metrics(), worker.metrics()
    assert deltas(first, nothing) == pytest.approx(result["worker_stats_first_read"])
    assert deltas(second, first) == pytest.approx(result["worker_stats_second_read"])
    found = mode.found(result)
    assert len(found) + 3 == len(result)
    assert_close(found, {key: result[key] for key in found}, "pools")
