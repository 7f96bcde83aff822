"""The HTTP server: OpenAI's interface over one ``Engine``. ``app.py`` holds the routes, ``server.py`` runs them."""
