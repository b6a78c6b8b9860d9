"""Wrappers: a plan, and runs of it."""
