"""A job of a fleet: its request, its frames, and its run."""
