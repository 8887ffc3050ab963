"""The command line of minivllm: `minivllm generate`, `chat` and `env`."""
