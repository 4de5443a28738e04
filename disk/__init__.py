"""Parts of store.py: files and atomic writes, edge sorting, LMDB, reading rows."""
