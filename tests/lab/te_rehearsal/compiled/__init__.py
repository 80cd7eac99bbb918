"""Answers for the compiled functions of Transformer Engine and Apex, in plain torch."""
