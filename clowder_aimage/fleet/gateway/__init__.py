"""A gateway: clients' requests become jobs of workers."""
