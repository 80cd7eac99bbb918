"""Step plans, the part of a batch that each rank needs, and memory estimates."""
