"""``coreai-rgba bench``: what the shortcuts save, as ratios of times taken in turns in one process."""
