"""Everything around the three graphs that needs no ComfyUI: usable from a script as it is."""
