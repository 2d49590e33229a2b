"""The durable record of sessions: the interface, and its SQLite and Redis implementations."""
