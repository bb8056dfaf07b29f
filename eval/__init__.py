"""Measures: acceptance, speed, losslessness, and the report."""
