"""The small model that ships with the pack, and the tiny random one that parity tests run on."""
