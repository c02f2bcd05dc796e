"""Running verifiers, and deciding whether their reward counts."""
