"""How model families write reasoning and tool calls, and the parsers that read them while an output streams."""
