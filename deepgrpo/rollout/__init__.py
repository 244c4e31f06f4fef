"""Rollout engines: token ids in, token ids with log-probs and a finish reason out."""
