"""Checkpoints, Hugging Face weights, and their publication to rollout engines."""
