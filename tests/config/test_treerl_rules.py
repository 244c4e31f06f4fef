"""What trees can't be combined with is refused by name; without them, their keys are nobody's business."""

import pytest

from tests.config.test_constraints import message, parse

TREES = ("--config.loop=treerl", "--config.curriculum.pool=none")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["--config.loop=treerl"], ["curriculum.pool = 'forest'", "curriculum.pool=none"]),
        (["--config.loop=treer"], ["did you mean treerl"]),
        ([*TREES, "--config.treerl.T=0"], ["treerl.T = 0", "[1, inf)"]),
        ([*TREES, "--config.treerl.M=1", "--config.treerl.L=0"], ["treerl.M = 1", "treerl.L = 0"]),
        ([*TREES, "--config.objective.advantage=rloo"], ["objective.advantage = 'rloo'", "advantages of their own"]),
        ([*TREES, "--config.objective.overlong=mask"], ["objective.overlong = 'mask'"]),
        ([*TREES, "--config.objective.teacher_loss=luffy"], ["objective.teacher_loss = 'luffy'"]),
    ],
)
def test_refused(overrides, parts):
    text = message(*overrides)
    assert all(part in text for part in parts), text


def test_accepted():
    config, _ = parse(*TREES, "--config.treerl.L=0")
    assert (config.loop, config.treerl.M, config.treerl.L) == ("treerl", 6, 0)
    parse("--config.treerl.M=1", "--config.treerl.L=0")  # another loop
