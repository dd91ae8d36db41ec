"""Fidelity checks against the reference implementation. They need diffusers; nothing at run time imports them."""
