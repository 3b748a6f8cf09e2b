"""A client's side of a worker's API: requests, and what their replies mean."""
