"""The chain and the flat pool under the teacher's thread and the trainer's at once: nothing is lost, nothing handed out twice."""

import random
import threading

import pytest

from deepgrpo.curriculum.chain_pool import DEEPENING
from tests.curriculum import test_chain, test_flat
from tests.curriculum.test_forest import RIGHT, WRONG, group, problem

STEPS = 120


class Teacher:
    """Takes failures and corrects, rejects or puts them back."""

    def __init__(self, made, trainer, seed):
        self.made, self.trainer, self.random = made, trainer, random.Random(seed)
        self.answered, self.outcomes = [], []

    def run(self):
        while not self.trainer.done.is_set():
            step = self.trainer.step
            for failure in self.made.dispatch(self.random.randint(1, 3), step):
                choice = self.random.random()
                if choice < 0.2:
                    self.made.requeue(failure)
                    continue
                correction = test_chain.correction(failure, self.random.randint(0, 2)) if choice < 0.7 else None
                self.answered.append(failure.event)
                self.outcomes.append(self.made.resolve(failure, correction, step))


class Trainer:
    def __init__(self, made, folder):
        self.made, self.folder, self.random, self.step = made, folder, random.Random(0), 0
        self.done = threading.Event()

    def run(self):
        try:
            for self.step in range(1, STEPS):
                self.train()
        finally:
            self.done.set()

    def train(self):
        groups = []
        for state in self.made.sample(self.made.wanted(8), self.step):
            groups.append(group(state.problem, self.random.choices((RIGHT, WRONG), k=2), state))
        for index in self.random.sample(range(40), 6):
            groups.append(group(problem(index, (index + 1,)), self.random.choices((RIGHT, WRONG), (1, 4), k=3)))
        self.made.observe(groups, self.step)
        self.made.metrics()
        if self.step % 40 == 0:
            test_chain.saved(self.made, self.folder / str(self.step))


@pytest.mark.parametrize("module", [test_chain, test_flat], ids=["chain", "flat"])
def test_threads(tmp_path, module):
    made = module.curriculum()
    trainer = Trainer(made, tmp_path)
    teachers = [Teacher(made, trainer, seed) for seed in range(3)]
    threads = [threading.Thread(target=party.run) for party in (*teachers, trainer)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trainer.step == STEPS - 1
    answered = [event for teacher in teachers for event in teacher.answered]
    outcomes = [outcome for teacher in teachers for outcome in teacher.outcomes]
    assert answered and len(set(answered)) == len(answered) and "stale" not in outcomes
    metrics = made.metrics()
    if module is test_flat:
        known = metrics["failed_pool/size"] + metrics["failed_pool/in_flight"] + len(answered)
        assert metrics["failed_pool/enqueued"] == known and metrics["synthetic_pool/size"] == outcomes.count("added")
        return
    assert metrics["chain_pool/teacher_successes"] == outcomes.count("deepened")
    assert metrics["chain_pool/abandoned_cumulative"] == outcomes.count("abandoned")
    waiting = sum(chain.state == DEEPENING for chain in made.pool.chains())
    assert len(made.dispatch(1000, STEPS)) == waiting == metrics["chain_pool/deepening"]
    for chain in made.pool.chains():
        depths = [len(node.ids) for node in chain.nodes]
        assert depths == sorted(set(depths))
    restored = module.curriculum()
    restored.restore(str(tmp_path / "80"))
    assert restored.metrics()["chain_pool/size"] > 0
