"""Sources of prompts: JSONL files, embedded tasks and reasoning-gym's generators."""
