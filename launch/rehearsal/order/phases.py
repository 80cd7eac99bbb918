"""The names of phases that only some ranks of a grid have."""

# A rank takes one of these phases: with its rollouts, or with only empty micro-batches.
WITH_ROLLOUTS = "uneven step, with rollouts"
WITHOUT_ROLLOUTS = "uneven step, empty micro-batches"
