"""OpenAI's HTTP API: models, completions, chat completions, responses, conversations."""
