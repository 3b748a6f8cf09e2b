"""The worker's interfaces; ``routes(service)`` of each module returns its routes."""
