"""Made-up models, rollouts and batches, and real runs to measure: shared by studies, GPU stages and tests."""
