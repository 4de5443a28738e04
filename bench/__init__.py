"""Benchmarks against other systems: python -m bench NAME."""
