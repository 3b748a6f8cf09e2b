"""Pictures of requests: files, URLs and artifacts to begin with, and artifacts of results."""
