"""Prompts to tokens to the target's answers (and its features), on disk."""
