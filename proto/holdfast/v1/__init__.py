"""Version 1 of the wire format: the ``.proto`` files and the stubs generated from them."""
