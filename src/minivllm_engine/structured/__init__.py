"""Answers in a form that was asked for: grammars compiled, and what they allow next."""
