"""Statistics, reports and metric definitions."""
