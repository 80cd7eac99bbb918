"""A run ahead of the trainer whose responses are aborted and whose engines are killed."""
