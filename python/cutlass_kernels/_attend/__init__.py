"""Attention without a plan: attention(), and single requests."""
