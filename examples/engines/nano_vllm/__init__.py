"""nano-vllm on this library."""
