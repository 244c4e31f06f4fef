"""Grading of the agents' tasks: judges, and programs in a sandbox."""
