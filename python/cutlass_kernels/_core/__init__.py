"""What all else stands on: the description of a call, checks, errors, tracing, autograd, the compiled module."""
