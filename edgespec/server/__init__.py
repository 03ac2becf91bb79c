"""The local server: OpenAI-compatible HTTP (`app`), JSON lines on standard streams (`stdio`), one scheduler."""
