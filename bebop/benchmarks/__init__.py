"""What ``python -m bebop.bench`` measures."""
