"""One run from its configuration to its exit code. `main.py` runs on every rank."""
