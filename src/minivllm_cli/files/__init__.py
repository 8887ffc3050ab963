"""Files of prompts in, files of answers out."""
