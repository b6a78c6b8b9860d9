"""Connections to other libraries. Each module imports its library when used, and nothing imports these modules."""
