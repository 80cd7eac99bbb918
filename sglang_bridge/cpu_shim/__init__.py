"""Stand-ins for the parts of a GPU machine that SGLang expects.

The directory is for the PYTHONPATH of CPU servers, not for import by the trainer.
"""
