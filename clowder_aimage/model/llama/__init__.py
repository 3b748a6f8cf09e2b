"""GGUF models, run by llama.cpp (the package ``xllamacpp``)."""
