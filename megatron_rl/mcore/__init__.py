"""All that the trainer needs from Megatron-Core."""
