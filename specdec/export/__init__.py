"""Checkpoints that serving engines load as they are."""
