"""The workers that a router reaches: links by name, placement of turns, migration of sessions."""
