"""The worker's interfaces; each module has ``routes(service)``, which returns its routes."""
