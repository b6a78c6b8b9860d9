"""Hugging Face transformers on this library."""
