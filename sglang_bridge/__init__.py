"""Everything that talks to SGLang: server processes, generation, weight updates and audits.

Collectors sample (`client.py`), ranks send weights (`weights/`), and local rank 0 of each node
starts servers (`server/`).
"""
