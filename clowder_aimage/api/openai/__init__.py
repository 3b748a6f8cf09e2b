"""OpenAI's interfaces: pictures, models and texts."""
