"""Loops: prompts in, scored groups of rollouts out."""
