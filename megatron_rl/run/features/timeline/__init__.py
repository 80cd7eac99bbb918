"""The timeline of a run: `timeline.jsonl`."""
