"""The server: HTTP over a session. Nothing else of jaxsok.serving imports it; the command line runs it."""
