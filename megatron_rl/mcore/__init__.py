"""Everything that the trainer needs from Megatron-Core."""
