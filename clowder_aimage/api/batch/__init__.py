"""OpenAI's files and batches: a worker or a gateway sends the requests in a file to itself."""
