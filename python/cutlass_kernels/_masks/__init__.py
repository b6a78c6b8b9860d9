"""Masks: custom ones as packed bits, those of draft tokens, and what a rank sees of keys that are spread."""
