"""Who computes an attention, and why; the kernels, and the contract in PyTorch."""
