"""Eviction policies: one protocol, one policy per file."""
