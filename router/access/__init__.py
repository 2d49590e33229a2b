"""Who may do what: keys, roles, and which request needs which."""
