"""The ways of ``create``: files of a model, adapters, an enhancer, a store of ollama."""
