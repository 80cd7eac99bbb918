"""Measures a step of this trainer beside a step of TRL's GRPOTrainer, on the same cores."""
