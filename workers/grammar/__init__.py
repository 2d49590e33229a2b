"""Grammars that constrain outputs: compiled once, then a mask of the allowed tokens for each position."""
