"""Who trains what: step plans, and the part of a batch that one rank needs."""
