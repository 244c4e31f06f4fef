"""A run's length in passes over the data, where hard states take the places of dataset prompts, and over a resumption."""

from tests.test_train import in_process

SETTINGS = {
    **{"train__steps": 0, "validation__every": 0, "checkpoint__every": 0, "telemetry__rollouts_every": 0},
    **{"curriculum__injection_ratio": 0.5, "teacher__oracle_error_rate": 0.0},
}


def test_epochs_are_passes_and_a_run_lengthened_at_their_boundary_equals_a_longer_one(student, tmp_path):
    whole = in_process(tmp_path / "whole", **SETTINGS, train__epochs=3)
    passes = [record["training/passes"] for record in whole]
    assert passes == sorted(passes) and passes[-1] >= 3.0 > passes[-2]
    assert len(whole) > 3  # steps of 16 prompts, half of which were states: three full batches would have been half the data
    first = in_process(tmp_path / "parts", **SETTINGS, train__epochs=1)
    assert first[-1]["training/passes"] >= 1.0 and len(first) < len(whole)
    assert [record["training/student_tokens"] for record in in_process(tmp_path / "parts", **SETTINGS, train__epochs=3)] == [
        record["training/student_tokens"] for record in whole
    ]
