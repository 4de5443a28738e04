"""Parts of train.py: flags, memory plan, checkpoints, logging, a step as CUDA graphs."""
