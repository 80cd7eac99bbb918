"""Everything that the trainer needs from Megatron-Core. It runs on every rank."""
