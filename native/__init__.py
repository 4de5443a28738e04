"""C and CUDA, their bindings and the compiler: with this folder beside them the root's files are fast."""
