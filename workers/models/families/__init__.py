"""One function for each architecture: from the fields of its ``config.json`` to a list of layers."""
