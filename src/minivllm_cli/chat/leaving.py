"""How a command says that the user leaves."""


class LeaveChat(Exception):
    """Ends the chat with exit code 0."""
