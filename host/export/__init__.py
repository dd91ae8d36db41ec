"""Checkpoint to ``.aimodel`` bundles. Needs torch and the Core AI converter; nothing at run time imports it."""
