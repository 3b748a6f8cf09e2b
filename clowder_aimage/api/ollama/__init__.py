"""ollama's interfaces."""
