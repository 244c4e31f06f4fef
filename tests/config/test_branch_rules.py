"""Combinations of the pools of branches that cannot work are refused; those that the variants need are not."""

import pytest

from tests.config.test_constraints import SEPARATE, message, parse

INLINE = ("--config.curriculum.pool=branches_inline", "--config.teacher.enabled=false")
BUFFERED = ("--config.curriculum.pool=branches", "--config.teacher.enabled=false")
SUFFIXES = ("--config.curriculum.pool=suffixes", *SEPARATE)
SFT = (*SUFFIXES, "--config.objective.teacher_loss=sft")


@pytest.mark.parametrize(
    "variant",
    [
        INLINE,
        (*INLINE, *SEPARATE),
        (*BUFFERED, "--config.curriculum.injection_ratio=0.001"),  # which only the other pools look at
        (*SUFFIXES, "--config.objective.teacher_loss=luffy", "--config.objective.advantage=rloo"),
        (*SFT, "--config.branches.branches_per_entry=0", "--config.objective.teacher_update=post_ppo"),
    ],
)
def test_variants_are_possible(variant):
    parse(*variant)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["--config.curriculum.pool=branches"], ["teacher.enabled = True", "nothing goes to the teacher"]),
        ([*INLINE, "--config.curriculum.injection_mode=replace"], ["injection_mode = 'replace'", "injection_mode=add"]),
        ([*INLINE, *SEPARATE, "--config.objective.teacher_loss=luffy"], ["teacher_loss", "the student's own"]),
        ([*INLINE, "--config.branches.branches_per_point=1"], ["branches.branches_per_point = 1", "[2, inf)"]),
        ([*INLINE, "--config.branches.segment_method=sentence"], ["branches.segment_method", "sp, tp, fp"]),
        ([*BUFFERED, "--config.branches.branches_per_entry=1"], ["branches.branches_per_entry = 1", "at least 2"]),
        ([*SUFFIXES, "--config.branches.branches_per_entry=0"], ["branches_per_entry = 0", "only objective.teacher_loss=sft"]),
        ([*SUFFIXES, "--config.curriculum.teacher_rows=false"], ["teacher_rows = False", "teacher_rows=True"]),
        ([*SUFFIXES, "--config.objective.whiten=true"], ["objective.whiten = True", "not whitened"]),
    ],
)
def test_impossible_combinations(overrides, parts):
    found = message(*overrides)
    assert all(part in found for part in parts), found


def test_only_the_pool_that_is_used_is_judged():
    parse("--config.branches.branches_per_entry=0")
