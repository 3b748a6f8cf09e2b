"""OpenAI's files and batches: requests in a file, which a worker or a gateway sends to itself."""
