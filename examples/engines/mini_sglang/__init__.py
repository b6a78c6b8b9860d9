"""mini-sglang on this library."""
