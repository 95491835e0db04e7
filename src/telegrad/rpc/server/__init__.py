"""How a request of another worker is served here: sessions, at most once, running the user's function."""
