"""Graders and the service that runs them in killable worker processes."""
