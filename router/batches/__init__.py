"""OpenAI's files and batches: requests in a file, run in the background, their answers in another file."""
