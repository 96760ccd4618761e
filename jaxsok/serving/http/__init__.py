"""The server: HTTP over a session. Nothing outside of this folder knows of it."""
