"""The names of phases that only some ranks of a grid have."""

# Phases of which a rank takes one: with its rollouts, or with empty micro-batches alone.
WITH_ROLLOUTS = "uneven step, with rollouts"
WITHOUT_ROLLOUTS = "uneven step, empty micro-batches"
