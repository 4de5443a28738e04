"""Parts of train.py: flags, memory plan, checkpoints, logging, custom models."""
