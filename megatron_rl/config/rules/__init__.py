"""Rules across values, one module per section of the configuration."""
