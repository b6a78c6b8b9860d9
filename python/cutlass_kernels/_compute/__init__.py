"""The choice of a backend and its reasons; the kernels; the contract in PyTorch."""
