"""Datasets with a resumable order, prompt templates, and the carry-chain task."""
