"""The command `inspect-cache`: what memory a model takes, and what of it is used."""
