"""`minivllm generate`: many prompts from a file, or one from the command line."""
