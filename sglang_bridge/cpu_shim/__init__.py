"""A directory for PYTHONPATH of CPU servers, not for import: it stands in for what SGLang expects
of a GPU machine.
"""
