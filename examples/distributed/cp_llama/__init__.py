"""A transformers model whose prompts and KV cache are spread over the ranks of torchrun."""
