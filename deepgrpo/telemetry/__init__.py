"""Metrics, dumps and plots of a run."""
