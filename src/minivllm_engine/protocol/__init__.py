"""What a request and its answer look like outside: JSON lines, OpenAI's bodies."""
