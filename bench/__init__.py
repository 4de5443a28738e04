"""Side by side with other systems: python -m bench NAME."""
