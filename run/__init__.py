"""What train.py is made of: flags, plan, checkpoint, report, the step as CUDA graphs."""
