"""Answer a file of prompts."""
