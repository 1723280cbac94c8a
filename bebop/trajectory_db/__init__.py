"""Database of all completions used for training, in one SQLite file: schema, writer and reader."""
