"""`minivllm chat`."""
