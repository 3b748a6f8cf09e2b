"""The worker's interfaces: each module has ``routes(service)``, a list of routes."""
