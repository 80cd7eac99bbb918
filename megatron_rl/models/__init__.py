"""Model families and tokenizers. Only `hf_checkpoint`, which reads tensors, imports torch."""
