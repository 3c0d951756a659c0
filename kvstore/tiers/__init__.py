"""One async service per level."""
