"""Load of multi-turn sessions on any server with OpenAI's chat API, and its figures."""
