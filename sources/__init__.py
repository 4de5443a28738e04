"""A name, a path or an object -> a store."""
