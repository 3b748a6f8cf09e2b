"""A client's side of a worker's API: requests and replies."""
