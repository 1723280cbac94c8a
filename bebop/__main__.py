"""``python -m bebop`` is the command ``bebop``."""

from bebop.cli import entry

if __name__ == "__main__":
    entry()
