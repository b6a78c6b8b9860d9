"""Serving engines, as published, on this library: one folder for each, and what they share."""
