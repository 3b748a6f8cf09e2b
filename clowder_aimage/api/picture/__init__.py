"""Pictures of requests and of responses, in the worker's interfaces."""
