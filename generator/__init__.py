"""Tasks out of Claude, in stages."""
