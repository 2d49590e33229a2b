"""SGLang's native HTTP API: generate, and its streaming and branching sessions."""
