"""Interfaces of language models: OpenAI's text APIs and ollama's."""
