"""Attention as operators, for torch.compile and other tracers."""
