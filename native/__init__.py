"""C and CUDA, bindings and compilation: with this folder beside them, the files in the root are fast."""
