"""Where prompts come from: JSONL files, embedded tasks and reasoning-gym's generators behind one
interface.
"""
