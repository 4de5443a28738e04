"""What store.py is made of: files and atomic writes, sorting edges, reading rows, the look-ahead cache, small graphs."""
