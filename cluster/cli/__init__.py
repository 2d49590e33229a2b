"""The ``holdfast`` command, one file a group of commands."""
