"""Stand-in: only the path to the API server exists; the real package is not here."""
