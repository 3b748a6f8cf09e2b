"""Language models: the common parts of their runtimes. A runtime is a folder of its own."""
