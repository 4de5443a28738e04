"""Parts of store.py: files and atomic writes, edge sorting, reading rows, the look-ahead cache, small graphs."""
