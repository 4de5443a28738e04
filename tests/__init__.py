"""Tests, a file for each module; common.py has what several use."""
