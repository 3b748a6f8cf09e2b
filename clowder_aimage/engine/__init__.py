"""The worker: a process that keeps models loaded and makes pictures for whoever may ask.

Each model lives in a process of its own (``process``), which a ``Runner`` speaks with; the
``Engine`` decides which are loaded, in what order requests are served, and when one goes. The
HTTP interfaces stand on it: OpenAI's, ollama's, Clowder's.
"""
