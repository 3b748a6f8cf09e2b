"""Language models: what their runtimes share. A runtime is a folder of its own."""
