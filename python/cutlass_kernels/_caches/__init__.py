"""Writing to paged caches."""
