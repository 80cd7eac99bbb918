"""Made-up models, rollouts and batches, and real runs, for studies, GPU stages and tests."""
