"""`minivllm serve`: an HTTP server that speaks OpenAI's protocol."""
